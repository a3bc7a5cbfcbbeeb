"""Find and open the compiled kernels."""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path

log = logging.getLogger(__name__)

_VERSION = 4  # of the functions' arguments; a library of another one was left by another version of Plansmith
SWITCH = "PLANSMITH_NATIVE"  # 0 in the environment: never use them
_POINTER, _SIZE, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_float
_SOURCE = (_POINTER, _INT, _SIZE, _SIZE)  # first value, its type, rows, columns
_MATRIX = (_POINTER, _SIZE)  # first value, floats from row to row
_SHAPE = (_SIZE, _SIZE)  # rows, outputs
_ARGUMENTS = {
    "measure": (*_SOURCE, _POINTER, _POINTER),
    "round_fp8": (*_SOURCE, _POINTER, _POINTER, _POINTER, _POINTER),
    "round_fp8_band": (*_SOURCE, _POINTER, _POINTER, _POINTER),
    "round_int8": (*_SOURCE, _POINTER, _POINTER, _POINTER),
    "round_int4": (*_SOURCE, _SIZE, _POINTER, _SIZE, _FLOAT, _INT, _POINTER, _POINTER, _POINTER, _POINTER),
    "round_nvfp4": (*_SOURCE, _FLOAT, _POINTER, _SIZE, _INT, _POINTER, _POINTER, _POINTER),
    "round_mxfp4": (*_SOURCE, _POINTER, _SIZE, _POINTER, _POINTER, _POINTER),
    "round_mxfp8": (*_SOURCE, _POINTER, _POINTER, _POINTER),
    "round_block": (*_SHAPE, *_MATRIX * 5, _POINTER, *_MATRIX * 2),
    "descend_block": (*_SHAPE, *_MATRIX * 6, _POINTER, *_MATRIX),
    "times_steps": (*_SHAPE, *_MATRIX * 3, _POINTER),
    "fit_scales": (*_SHAPE, *_MATRIX * 5, _POINTER, _POINTER, _POINTER, _FLOAT, _INT),
    "search_scales": (*_SHAPE, *_MATRIX, _POINTER, _POINTER, _POINTER, _POINTER, _SIZE, _INT, _POINTER),
}
# Functions written for one kind of processor are not there at all on others: by the one, always there, that tells.
_OF_SOME_PROCESSORS: dict[str, dict[str, tuple[type, ...]]] = {
    "casts_halves": {"cast_halves": (_SIZE, _POINTER, _POINTER)},
    "multiplies_bfloat16": {
        "pack_tokens": (*_SHAPE, *_MATRIX, _POINTER, _SIZE),
        "add_products": (_SIZE, *_MATRIX * 2, *(_SIZE,) * 4, _INT, *_MATRIX, *_SHAPE),
    },
}


@cache
def native_library() -> ctypes.CDLL | None:
    """None where the kernels are switched off or were not built. Calls release the GIL."""
    if os.environ.get(SWITCH) == "0":
        return None
    built = sorted(Path(__file__).parent.glob("rounding*.so"))
    if not built:
        log.warning(
            "the native kernels were not built, so rounding takes several times as long; "
            "install a C compiler and install plansmith again"
        )
        return None
    try:
        library = ctypes.CDLL(str(built[0]))
        if library.rounding_version() != _VERSION:
            raise OSError(f"version {library.rounding_version()}, expected {_VERSION}")
        _declare(library, _ARGUMENTS)
        for tells, functions in _OF_SOME_PROCESSORS.items():
            _declare(library, {tells: ()})
            if getattr(library, tells)():
                _declare(library, functions)
    except (OSError, AttributeError) as error:  # of another machine, or of another version
        log.warning("%s cannot be used (%s), so rounding takes several times as long; install again", built[0], error)
        return None
    return library


def _declare(library: ctypes.CDLL, functions: Mapping[str, tuple[type, ...]]) -> None:
    """Raises AttributeError for one that is not there."""
    for name, arguments in functions.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, ctypes.c_int64
