"""What a linter finds, and what it compares: expected tensors against stored ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

Kind = Literal["missing", "extra", "shape", "dtype", "value", "scale", "shard", "config", "file"]


@dataclass(frozen=True)
class Finding:
    kind: Kind
    where: str  # a tensor, a file or a key
    message: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.where}: {self.message}"


@dataclass(frozen=True)
class Expected:
    """A tensor that the config implies. ``dtypes``: any of these NumPy names will do; ``or_scalar``: [] for [1] too."""

    dtypes: tuple[str, ...]
    shape: tuple[int, ...]
    is_required: bool = True
    is_scale: bool = False
    or_scalar: bool = False

    def __str__(self) -> str:
        return f"{' or '.join(self.dtypes)} {list(self.shape)}"


class Stored(Protocol):
    """TensorInfo and StoredTensor both will do."""

    @property
    def dtype(self) -> Any: ...

    @property
    def shape(self) -> tuple[int, ...]: ...


def compare(expected: Mapping[str, Expected], stored: Mapping[str, Stored], where: str = "") -> list[Finding]:
    """Missing and extra names, wrong shapes and types. ``where`` stands before each name."""
    findings = []
    for name, wanted in expected.items():
        found = stored.get(name)
        if found is None:
            if wanted.is_required:
                findings.append(Finding("missing", where + name, f"expected {wanted}"))
        elif tuple(found.shape) != wanted.shape and not (wanted.or_scalar and found.shape == ()):
            findings.append(Finding("shape", where + name, f"is {list(found.shape)}, expected {list(wanted.shape)}"))
        elif str(found.dtype) not in wanted.dtypes:
            findings.append(Finding("dtype", where + name, f"is {found.dtype}, expected {' or '.join(wanted.dtypes)}"))
    findings += [
        Finding("extra", where + name, f"{found.dtype} {list(found.shape)} belongs to no such model")
        for name, found in stored.items()
        if name not in expected
    ]
    return findings
