"""Copy the weights of a model as cp would: plain_copy.py MODEL OUTPUT WRITTEN_BYTES

All of them are read, and of each block so much is written that WRITTEN_BYTES are in the end: a conversion that halves
a file is measured against a copy that reads all and writes half.
"""

import os
import sys
from pathlib import Path

BLOCK = 8 * 2**20


def main() -> None:
    source, output, written = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    files = sorted(source.glob("*.safetensors"))
    share = written / sum(file.stat().st_size for file in files)
    output.mkdir()
    for file in files:
        copy(file, output / file.name, share)


def copy(source: Path, output: Path, share: float) -> None:
    block = memoryview(bytearray(BLOCK))
    with source.open("rb", buffering=0) as reader, output.open("wb", buffering=0) as writer:
        os.posix_fadvise(reader.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        while size := reader.readinto(block):
            writer.write(block[: round(size * share)])


if __name__ == "__main__":
    main()
