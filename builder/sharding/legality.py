"""Over how many ranks a model can be spread, checked before any work."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from builder.model_spec import ModelSpec
from builder.network.weights import WeightSource
from builder.parallel import Parallelism, Rank
from builder.sharding.cuts import Axis, share_of, split_axis
from builder.sharding.slices import describe_groups, group_length, share_is_legal
from plansmith_errors import BuildError

if TYPE_CHECKING:
    from quantize import QuantizedTensor

_Layouts = dict[tuple[object, ...], tuple[str, Axis, "QuantizedTensor"]]


def check_parallelism(spec: ModelSpec, parallelism: Parallelism, weights: WeightSource | None = None) -> None:
    """Raise BuildError, with the values that are legal, where the model cannot be spread so.

    With ``weights``, groups and blocks of quantized ones count as well: no rank may get a part of one.
    """
    for name in ("tp_size", "pp_size", "ep_size"):
        if getattr(parallelism, name) < 1:
            raise BuildError(f"{name} is {getattr(parallelism, name)}; expected 1 or more")
    if parallelism.pp_size > spec.num_layers:
        raise BuildError(
            f"pp_size is {parallelism.pp_size}, but the model has {spec.num_layers} layers; "
            f"expected 1 to {spec.num_layers}"
        )
    layouts = {} if weights is None else _layouts(weights)
    reason = next(_expert_obstacles(spec, parallelism), None)
    if reason is not None:
        legal = [size for size in range(1, parallelism.tp_size + 1) if _experts_fit(spec, parallelism.tp_size, size)]
        raise BuildError(f"ep_size is {parallelism.ep_size}: {reason}; {_choices('ep_size', legal)}")
    reason = next(_tensor_obstacles(spec, parallelism, layouts), None)
    if reason is not None:
        legal = _legal_tp_sizes(spec, parallelism.ep_size, layouts)
        raise BuildError(f"tp_size is {parallelism.tp_size}: {reason}; {_choices('tp_size', legal)}")


def legal_tp_sizes(spec: ModelSpec, weights: WeightSource | None = None, ep_size: int = 1) -> list[int]:
    """Every tensor-parallel size that the model can be split by."""
    return _legal_tp_sizes(spec, ep_size, {} if weights is None else _layouts(weights))


def _legal_tp_sizes(spec: ModelSpec, ep_size: int, layouts: _Layouts) -> list[int]:
    sizes = (size for size in range(1, spec.num_heads + 1) if _experts_fit(spec, size, ep_size))
    return [size for size in sizes if not any(_tensor_obstacles(spec, Parallelism(size, 1, ep_size), layouts))]


def _experts_fit(spec: ModelSpec, tp_size: int, ep_size: int) -> bool:
    return not any(_expert_obstacles(spec, Parallelism(tp_size, 1, ep_size)))


def _expert_obstacles(spec: ModelSpec, parallelism: Parallelism) -> Iterator[str]:
    ep_size, mixture = parallelism.ep_size, spec.mixture
    if mixture is None:
        if ep_size > 1:
            yield "the model has no experts"
        return
    if parallelism.tp_size % ep_size:
        yield f"it does not divide tp_size, which is {parallelism.tp_size}"
    if mixture.num_experts % ep_size:
        yield f"the model's {mixture.num_experts} experts are no multiple of it"


def _tensor_obstacles(spec: ModelSpec, parallelism: Parallelism, layouts: _Layouts) -> Iterator[str]:
    """Why ``tp_size`` does not fit, with an ``ep_size`` that does."""
    tp_size, mixture = parallelism.tp_size, spec.mixture
    if spec.num_heads % tp_size:
        yield f"num_attention_heads {spec.num_heads} is no multiple of it"
    if spec.num_kv_heads % tp_size and tp_size % spec.num_kv_heads:
        yield f"num_key_value_heads {spec.num_kv_heads} is neither a multiple nor a divisor of it"
    if spec.vocab_size % tp_size:
        yield f"vocab_size {spec.vocab_size} is no multiple of it"
    if (mixture is None or not all(mixture.sparse_layers)) and spec.intermediate_size % tp_size:
        yield f"intermediate_size {spec.intermediate_size} is no multiple of it"
    if mixture is not None and mixture.intermediate_size % parallelism.moe_tp_size:
        yield f"the experts' intermediate size {mixture.intermediate_size} is no multiple of tp_size / ep_size"
    for name, axis, weight in layouts.values():
        shares = _num_shares(name, spec, parallelism)
        size = weight.shape[0 if axis == "rows" else 1] // shares
        if shares > 1 and not share_is_legal(weight, axis, size):
            yield f"it leaves each rank {size} {axis} of {name}, which tears its {describe_groups(weight)}"


def _num_shares(name: str, spec: ModelSpec, parallelism: Parallelism) -> int:
    return share_of(name, spec, Rank(parallelism))[1]


def _layouts(weights: WeightSource) -> _Layouts:
    """One example, name and axis of split, of each kind of quantized weight whose groups a split may tear."""
    layouts: _Layouts = {}
    if not weights.is_quantized:
        return layouts
    for name, shape in weights.shapes.items():
        axis = split_axis(name)
        if axis is None or len(shape) != 2:
            continue
        weight = weights.stored(name)
        step = group_length(weight, axis)
        if step != 1 and weight.scheme != "none":
            kind = (axis, weight.shape, weight.scheme, step, name.rsplit(".", 2)[-2])
            layouts.setdefault(kind, (name, axis, weight))
    return layouts


def _choices(name: str, legal: Sequence[int]) -> str:
    if not legal:
        return f"no {name} fits with the other sizes"
    return f"legal {name}: {', '.join(map(str, legal))}"
