"""Which GPU architectures compute which types: the table is checked before any work."""

from __future__ import annotations

from collections.abc import Iterable

from builder.targets.tensorrt.module import TensorRtTarget
from builder.targets.tensorrt.options import NetworkOptions
from plansmith_errors import BuildError

_PLAIN, _AMPERE = ("float16", "int8"), ("float16", "bfloat16", "int8", "int4")
_ADA = (*_AMPERE, "fp8", "mxfp8")
_BLACKWELL = (*_ADA, "nvfp4", "mxfp4")

# As the builder of TensorRT-RTX 1.7 compiles for each, found by compiling a linear of each type.
RTX_TYPES: dict[int, tuple[str, ...]] = {
    75: _PLAIN,
    80: _AMPERE,
    86: _AMPERE,
    89: _ADA,
    120: _BLACKWELL,
    121: _BLACKWELL,
}


# Those that only the standard TensorRT serves. Nothing was compiled for them here: as ModelOpt's support matrix has it,
# fp8 from Ada and Hopper on, four-bit floats from Blackwell on.
_DATA_CENTER_TYPES: dict[int, tuple[str, ...]] = {
    90: (*_AMPERE, "fp8"),
    100: _BLACKWELL,
    103: _BLACKWELL,
    110: _BLACKWELL,
}
_TYPES: dict[TensorRtTarget, dict[int, tuple[str, ...]]] = {
    "tensorrt-rtx": RTX_TYPES,
    "tensorrt": dict(sorted({**RTX_TYPES, **_DATA_CENTER_TYPES}.items())),
}


def check_types(types: Iterable[str], sms: Iterable[int], target: TensorRtTarget = "tensorrt-rtx") -> None:
    """Raise BuildError, with the table, where one of ``sms`` lacks one of ``types``.

    ``types`` are the network's dtype and the schemes of weights and activations.
    """
    wanted = [name for name in dict.fromkeys(types) if name != "none"]
    known = _TYPES[target]
    for sm in sms:
        if sm not in known:
            others = "; build for others with target tensorrt on a machine that has one"
            raise BuildError(
                f"sm{sm} is none of those that {target} compiles for ({', '.join(f'sm{each}' for each in known)})"
                f"{others if target == 'tensorrt-rtx' else ''}"
            )
        missing = [name for name in wanted if name not in known[sm]]
        if missing:
            raise BuildError(f"sm{sm} does not compute {' and '.join(missing)}; {type_table(target)}")


def check_limits(options: NetworkOptions) -> None:
    """Raise BuildError for sizes that no network can have."""
    block = options.tokens_per_block
    if block < 1 or block & (block - 1):
        raise BuildError(f"tokens_per_block is {block}; expected a power of two")
    for name in ("max_batch_size", "max_num_tokens", "max_seq_len"):
        if getattr(options, name) < 1:
            raise BuildError(f"{name} is {getattr(options, name)}; expected 1 or more")


def type_table(target: TensorRtTarget = "tensorrt-rtx") -> str:
    """On one line: "sm75: float16, int8; sm80, sm86: float16, bfloat16, int8, int4; ..."."""
    by_types: dict[tuple[str, ...], list[str]] = {}
    for sm, types in _TYPES[target].items():
        by_types.setdefault(types, []).append(f"sm{sm}")
    return "; ".join(f"{', '.join(sms)}: {', '.join(types)}" for types, sms in by_types.items())
