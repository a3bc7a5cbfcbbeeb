"""Reads every value: NaN, infinity, and scales of zero, in bounded memory."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from quantize.lint.finding import Expected, Finding

_CHUNK_VALUES = 2**22
_INTEGERS = "iub"

LoadRows = Callable[[int, int], npt.NDArray[Any]]


def value_findings(where: str, shape: tuple[int, ...], load_rows: LoadRows, expected: Expected | None) -> list[Finding]:
    """What is wrong with the values of one tensor: at most one finding of each kind."""
    rows = shape[0] if shape else 1
    step = max(1, _CHUNK_VALUES // max(1, prod(shape[1:])))
    num_bad = num_zero = 0
    for begin in range(0, rows, step):
        values = load_rows(begin, min(begin + step, rows))
        if values.dtype.kind in _INTEGERS:
            return []
        num_bad += int(values.size - np.isfinite(values).sum())
        if expected is not None and expected.is_scale:
            num_zero += int((values.astype(np.float32) <= 0).sum())
    findings = []
    if num_bad:
        findings.append(Finding("value", where, f"{num_bad} of {prod(shape)} values are not finite"))
    if num_zero:
        findings.append(Finding("scale", where, f"{num_zero} of {prod(shape)} scales are zero or negative"))
    return findings
