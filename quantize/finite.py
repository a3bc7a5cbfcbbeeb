"""NaN and infinity in a source are refused, with the row they are in."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from plansmith_errors import QuantizeError

DAMAGED = "is not finite; the source is damaged"


def check_finite(name: str, rows: npt.NDArray[Any], begin: int, problem: str = DAMAGED) -> None:
    """Raise QuantizeError naming the first of the rows ``begin`` ... that holds NaN or infinity."""
    finite = np.isfinite(rows)
    if not finite.all():
        raise bad_row(name, begin + int(np.argwhere(~finite)[0][0]), problem)


def bad_row(name: str, row: int, problem: str = DAMAGED) -> QuantizeError:
    return QuantizeError(f"tensor {name!r}: a value in row {row} {problem}")
