"""A weight matrix as another tool stored it: to float32 by rows, and to the neutral format where that can hold it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from quantize.foreign.parts import Part
from quantize.weight_rule import FloatSettings, Granularity, Int4Settings, SchemeName

Float32 = npt.NDArray[np.float32]

_FLOAT32_TINY = np.finfo(np.float32).tiny
_GRANULARITIES = {"tensor": " per tensor", "channel": " per channel", "block": " in blocks"}


@dataclass(frozen=True)
class Form:
    """A scheme of the neutral format, whichever way its values were chosen."""

    scheme: SchemeName
    group_size: int | None = None  # int4
    symmetric: bool = True
    granularity: Granularity | None = None  # fp8

    @classmethod
    def asked(cls, scheme: SchemeName, int4: Int4Settings | None, floats: FloatSettings | None) -> Form:
        """What a recipe's rule asks for."""
        if int4 is not None:
            return cls(scheme, int4.group_size, int4.symmetric)
        return cls(scheme, granularity=floats.granularity if floats is not None and scheme == "fp8" else None)

    def __str__(self) -> str:
        if self.scheme == "int4":
            return f"int4 g{self.group_size} {'symmetric' if self.symmetric else 'asymmetric'}"
        return self.scheme + _GRANULARITIES.get(self.granularity or "", "")


class PackedWeight(ABC):
    """W [out, in]. Nothing is read before it is asked for.

    ``parts`` are the tensors that it is made of. ``pre_quant_scale`` [in], one of them: inputs are multiplied by it, so
    W is what is stored times it.
    """

    def __init__(self, shape: tuple[int, int], parts: Sequence[Part | None], pre_quant_scale: Part | None) -> None:
        self.shape = shape
        self.parts = tuple(part for part in (*parts, pre_quant_scale) if part is not None)
        self.pre_quant_scale = pre_quant_scale

    @property
    def nbytes(self) -> int:
        return sum(part.info.nbytes for part in self.parts)

    @property
    @abstractmethod
    def kind(self) -> str:
        """For people: "int4 g128", "fp8 in blocks"."""

    @property
    @abstractmethod
    def form(self) -> Form | None:
        """The neutral scheme that it is stored in; None when there is no such scheme."""

    @abstractmethod
    def values(self, begin: int, end: int) -> npt.NDArray[Any]:
        """Rows of q as the neutral format stores them; of a weight that has a ``form``."""

    @abstractmethod
    def scales(self) -> list[npt.NDArray[Any]]:
        """Scales, then zero points or the tensor's scale where there are such, as the neutral format stores them."""

    @abstractmethod
    def stored_rows(self, begin: int, end: int) -> Float32:
        """(q - z) * s of these rows: [end - begin, in]."""

    def rows(self, begin: int, end: int) -> Float32:
        """Rows of W: [end - begin, in]."""
        with np.errstate(over="ignore", invalid="ignore"):  # whoever uses them checks that they are finite
            rows = self.stored_rows(begin, end)
            return rows if self.pre_quant_scale is None else rows * self.pre_quant_scale.load_float32()

    def obstacle(self) -> str | None:
        """Why the neutral format cannot hold the values and scales, though it has the ``form``. Reads the scales."""
        if self.pre_quant_scale is not None:
            return "their inputs are scaled (pre_quant_scale)"
        return None if usable(self.scales()[0]) else "some scales are zero, negative or not finite"


def usable(scales: npt.NDArray[Any]) -> bool:
    """Finite, positive, and with a reciprocal in float32."""
    values = scales.astype(np.float32)
    return bool((np.isfinite(values) & (values >= _FLOAT32_TINY)).all())
