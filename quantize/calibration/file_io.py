"""Arrays at a place in a file, read and written without mapping it: mapped pages would count as the process's own."""

from __future__ import annotations

import os

import numpy as np
import numpy.typing as npt

Float32 = npt.NDArray[np.float32]


def read_all(descriptor: int, values: Float32, offset: int) -> None:
    """Fill ``values``, contiguous, from byte ``offset`` on. Raises OSError."""
    data = values.reshape(-1).view(np.uint8)
    while data.size:
        count = os.preadv(descriptor, [data.data], offset)
        if count == 0:
            raise OSError("the file of activations is shorter than it was")
        data, offset = data[count:], offset + count


def write_all(descriptor: int, values: Float32, offset: int) -> None:
    """Raises OSError (a full disk)."""
    data = np.ascontiguousarray(values, np.float32).reshape(-1).view(np.uint8)
    while data.size:
        written = os.pwrite(descriptor, data.data, offset)
        data, offset = data[written:], offset + written
