"""Proof of quantization: what each weight matrix became, in stored bytes, bits per weight and error."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod, sqrt
from typing import Any

from plansmith_errors import CheckpointError
from quantize.activations import Activations, activations_of
from quantize.checkpoint import Checkpoint
from quantize.quantized_tensor import QUANT_METHOD, load_weight


@dataclass(frozen=True)
class StoredWeight:
    """One matrix of a quantized checkpoint."""

    name: str
    scheme: str
    group_size: int | None
    num_weights: int
    nbytes: int  # with scales and zero points
    relative_error: float  # |W - dequantized| / |W|, Frobenius norms, against the source's values
    granularity: str | None = None  # of fp8's scales: tensor or block; None: the usual ones of the scheme
    activations: Activations | None = None  # of the inputs

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.nbytes / max(self.num_weights, 1)

    @property
    def kind(self) -> str:
        """The scheme as a reader distinguishes it: "int8", "int4 g64", "fp8 per tensor, static fp8 activations"."""
        kind = self.scheme if self.group_size is None else f"{self.scheme} g{self.group_size}"
        kind = kind if self.granularity is None else f"{kind} per {self.granularity}"
        return kind if self.activations is None else f"{kind}, {self.activations}"


@dataclass(frozen=True)
class SchemeTotal:
    kind: str
    num_tensors: int
    num_weights: int
    nbytes: int
    relative_error: float
    """Root of the mean of the matrices' squared errors, weighted by their number of weights."""

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.nbytes / max(self.num_weights, 1)


def checkpoint_weights(checkpoint: Checkpoint) -> list[StoredWeight]:
    """Every matrix that ``checkpoint`` describes, with its stored bytes; empty if Plansmith did not quantize it.

    Values are mapped, not read. Raises CheckpointError when the description does not fit docs/quantized-checkpoint.md.
    """
    source = str(checkpoint.path)
    stored = []
    for name, entry in _entries(checkpoint.config.get("quantization_config"), source).items():
        weight = load_weight(checkpoint, name)
        stored.append(_stored_weight(name, entry, prod(weight.shape), weight.nbytes, source))
    return stored


def described_weights(
    quantization: dict[str, Any] | None, shapes: Mapping[str, tuple[int, ...]], source: str
) -> list[StoredWeight]:
    """The same from a ``quantization_config`` alone, as an engine's manifest keeps it, and the matrices' shapes.

    Bytes follow from the bits per weight, which the config rounds to four digits. ``source`` is named in errors.
    """
    return [
        _stored_weight(name, entry, prod(shapes[name]), None, source)
        for name, entry in _entries(quantization, source).items()
        if name in shapes
    ]


def scheme_totals(weights: Iterable[StoredWeight]) -> list[SchemeTotal]:
    """One total per scheme and group size, the largest first."""
    by_kind: dict[str, list[StoredWeight]] = {}
    for weight in weights:
        by_kind.setdefault(weight.kind, []).append(weight)
    totals = [_total(kind, members) for kind, members in by_kind.items()]
    return sorted(totals, key=lambda total: -total.nbytes)


def worst_weights(weights: Iterable[StoredWeight], count: int) -> list[StoredWeight]:
    """The ``count`` matrices with the largest relative error, those without any left out."""
    changed = [weight for weight in weights if weight.relative_error > 0]
    return sorted(changed, key=lambda weight: -weight.relative_error)[:count]


def _total(kind: str, members: Sequence[StoredWeight]) -> SchemeTotal:
    num_weights = sum(weight.num_weights for weight in members)
    squares = sum(weight.relative_error**2 * weight.num_weights for weight in members)
    nbytes = sum(weight.nbytes for weight in members)
    return SchemeTotal(kind, len(members), num_weights, nbytes, sqrt(squares / max(num_weights, 1)))


def _entries(quantization: object, source: str) -> dict[str, dict[str, Any]]:
    if quantization is None:
        return {}
    if not isinstance(quantization, dict):
        raise CheckpointError(f"{source}: quantization_config is {quantization!r}, expected an object")
    if quantization.get("quant_method") != QUANT_METHOD:
        return {}
    tensors = quantization.get("tensors")
    if not isinstance(tensors, dict) or not all(isinstance(entry, dict) for entry in tensors.values()):
        raise CheckpointError(f"{source}: quantization_config.tensors is not an object of objects; quantize it again")
    return tensors


def _stored_weight(name: str, entry: dict[str, Any], num_weights: int, nbytes: int | None, source: str) -> StoredWeight:
    bits, error = (_number(entry, key, name, source) for key in ("bits_per_weight", "relative_error"))
    scheme, group_size = entry.get("scheme"), entry.get("group_size")
    if not isinstance(scheme, str) or not (group_size is None or type(group_size) is int):
        raise CheckpointError(
            f"{source}: {name} has scheme {scheme!r} and group_size {group_size!r}; quantize the checkpoint again"
        )
    stored = round(bits * num_weights / 8) if nbytes is None else nbytes
    granularity = entry.get("granularity")
    try:
        activations = activations_of(entry)
    except ValueError as reason:
        raise CheckpointError(f"{source}: {name}: {reason}; quantize the checkpoint again") from None
    shown = granularity if isinstance(granularity, str) else None
    return StoredWeight(name, scheme, group_size, num_weights, stored, error, shown, activations)


def _number(entry: dict[str, Any], key: str, name: str, source: str) -> float:
    value = entry.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
        raise CheckpointError(
            f"{source}: {name} has {key} {value!r}, expected a number of 0 or more; quantize it again"
        )
    return float(value)
