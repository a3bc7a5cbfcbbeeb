"""What a process has freed no longer counts as its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import numpy as np
from quantize.freed_memory import trim_freed_memory
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096
blocks = [np.ones(20_000, np.float32) for _ in range(2000)]
kept = blocks[-1]
del blocks
before = resident()
trim_freed_memory()
print(before - resident())
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux")
def test_freed_blocks_are_given_back() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    assert int(done.stdout) > 100e6, "160 MB were freed behind a block that is still held"
