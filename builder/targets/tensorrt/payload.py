"""Bytes as TensorRT takes them: an element type that NumPy may lack, a shape, and an array that holds them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from builder.targets.tensorrt.options import NetworkDtype
from plansmith_errors import BuildError
from quantize.finite import all_finite
from quantize.native.casts import native_casts

ElementType = Literal["float32", "float16", "bfloat16", "int64", "int32", "int8", "bool", "int4", "fp8", "fp4", "e8m0"]

_NUMPY_TYPES: dict[str, type[np.generic]] = {
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": np.uint16,
    "int64": np.int64,
    "int32": np.int32,
    "int8": np.int8,
    "bool": np.bool_,
    "int4": np.uint8,
    "fp8": np.uint8,
    "fp4": np.uint8,
    "e8m0": np.uint8,
}
FOUR_BITS = ("int4", "fp4")


@dataclass(frozen=True)
class Payload:
    """``array`` holds the elements in C order: bfloat16 as uint16, fp8 (e4m3) and e8m0 as uint8, int4 (two's
    complement) and fp4 (e2m1) two in a byte with the even element in the low nibble.
    """

    dtype: ElementType
    shape: tuple[int, ...]
    array: npt.NDArray[Any]

    def __post_init__(self) -> None:
        if self.array.dtype != _NUMPY_TYPES[self.dtype] or self.array.nbytes != self.nbytes:
            raise ValueError(
                f"a payload of {self.dtype} {self.shape} cannot be {self.array.dtype} of {self.array.size} elements"
            )

    @property
    def nbytes(self) -> int:
        size = int(np.prod(self.shape, dtype=np.int64))
        return (size // 2 if self.dtype in FOUR_BITS else size) * np.dtype(_NUMPY_TYPES[self.dtype]).itemsize

    @property
    def source(self) -> npt.NDArray[Any]:
        """The array that was read."""
        return self.array

    def now(self) -> Payload:
        """With an array that stays."""
        return self


class Deferred(Payload):
    """``array`` is made of ``source`` when it is asked for, each time anew, and what makes it may raise then."""

    _source: npt.NDArray[Any]
    _make: Callable[[], npt.NDArray[Any]]

    def __init__(
        self,
        dtype: ElementType,
        shape: tuple[int, ...],
        source: npt.NDArray[Any],
        make: Callable[[], npt.NDArray[Any]],
    ) -> None:
        for field, value in (("dtype", dtype), ("shape", shape), ("_source", source), ("_make", make)):
            object.__setattr__(self, field, value)

    @property
    def array(self) -> npt.NDArray[Any]:  # type: ignore[override]
        return self._make()

    @property
    def source(self) -> npt.NDArray[Any]:
        """The array that was read."""
        return self._source

    def now(self) -> Payload:
        """With an array that stays."""
        return Payload(self.dtype, self.shape, self.array)


def numpy_type(dtype: ElementType) -> type[np.generic]:
    """Of a payload's array."""
    return _NUMPY_TYPES[dtype]


def raw_payload(dtype: ElementType, array: npt.NDArray[Any], shape: tuple[int, ...] | None = None) -> Payload:
    """``array``, of any type of the same width, taken for elements of ``dtype``; a view where it is contiguous."""
    contiguous = np.ascontiguousarray(array).reshape(array.shape)
    return Payload(dtype, array.shape if shape is None else shape, contiguous.view(_NUMPY_TYPES[dtype]))


def deferred_cast(values: npt.NDArray[Any], dtype: NetworkDtype, name: str) -> Deferred:
    """As ``float_payload``, which casts, and may raise, when the array is asked for."""
    return Deferred(dtype, values.shape, values, lambda: float_payload(values, dtype, name).array)


def float_payload(values: npt.NDArray[Any], dtype: NetworkDtype, name: str) -> Payload:
    """``values`` rounded to ``dtype``; a view where they have that type. Raises BuildError on overflow."""
    import ml_dtypes

    wanted: Any = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.dtype(dtype)
    if values.dtype == wanted:
        return raw_payload(dtype, values)
    kernels = native_casts()
    if kernels is not None and values.dtype == ml_dtypes.bfloat16 and dtype == "float16":
        cast = kernels.float16_of_bfloat16(values)
    else:
        with np.errstate(over="ignore"):
            cast = values.astype(wanted)
    if cast is None or (dtype == "float16" and not all_finite(cast)):
        raise BuildError(f"{name} has values beyond the range of float16; set build.dtype to bfloat16")
    return raw_payload(dtype, cast)
