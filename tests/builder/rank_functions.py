"""Stand-ins for the function that builds a rank: each misbehaves in one way."""

import logging
import os
import signal
import sys
import time
from pathlib import Path

from plansmith_errors import BuildError


def write(arguments, output: Path, on_weight):
    """Writes one file; ``arguments["fail"]`` maps a rank's number to what happens to it."""
    rank = arguments["rank"]
    on_weight(1, 2, "model.norm.weight")
    _misbehave(arguments.get("fail", {}).get(str(rank)))
    time.sleep(arguments.get("seconds", 0))
    held = bytearray(os.urandom(1)) * arguments.get("hold_bytes", 1)
    (output / f"rank{rank}.plan").write_bytes(b"plan of %d" % rank)
    started = Path(arguments["log"]) / f"{rank}-{time.monotonic_ns()}"
    started.write_text(str(os.getpid()))
    return {"rank": rank, "held": len(held)}


def _misbehave(how):
    if how == "refuse":
        raise BuildError("TensorRT refuses the network:\n no kernel")
    if how == "bug":
        raise KeyError("lost")
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "abort":
        sys.stderr.write("free(): invalid pointer\n")
        sys.stderr.flush()
        os.abort()
    if how == "exit":
        os._exit(7)
    if how == "print":
        os.write(1, b"a library's own words\n")
    if how == "warn":
        logging.getLogger("builder.example").warning("int4 groups are unusual")
    if how == "hang":
        time.sleep(600)
