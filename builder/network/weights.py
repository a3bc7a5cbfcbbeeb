"""The weights a decoder needs, by name and shape, and their reading from a checkpoint with every shape checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from builder.model_spec import ModelSpec
from plansmith_errors import BuildError

if TYPE_CHECKING:
    from quantize import Checkpoint, QuantizedTensor

# Parts of a quantized weight, and what belongs to its inputs or outputs.
_COMPANIONS = (
    ".weight_scale",
    ".weight_scale_2",
    ".weight_zero_point",
    ".input_scale",
    ".pre_quant_scale",
    ".k_scale",
    ".v_scale",
)
_IGNORED = (".rotary_emb.inv_freq",)  # a table that old checkpoints carry; we compute our own


class DecoderWeights(Protocol):
    """What a target builds a network from: a checkpoint's weights, or one rank's slices of them."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Name and logical shape of each weight, in the order of use."""
        ...

    @property
    def kinds(self) -> set[tuple[str, int | None]]:
        """Scheme and group size of the matrices read so far."""
        ...

    def matrix(self, name: str) -> QuantizedTensor:
        """An embedding or linear weight, [out_features, in_features], as it is stored."""
        ...

    def vector(self, name: str) -> npt.NDArray[np.float32]:
        """A norm weight or bias, [features]."""
        ...

    def kv_scales(self, layer: int) -> tuple[str, npt.NDArray[np.float32], npt.NDArray[np.float32]] | None:
        """The scheme of the KV cache that the checkpoint was calibrated for, and the scales [] of keys and values."""
        ...


def expected_weights(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Name and logical shape of every weight of the decoder, in the order of use."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (spec.vocab_size, spec.hidden_size)}
    for layer in range(spec.num_layers):
        shapes |= _layer_weights(spec, layer)
    shapes["model.norm.weight"] = (spec.hidden_size,)
    shapes[spec.lm_head_name] = (spec.vocab_size, spec.hidden_size)
    return shapes


def _layer_weights(spec: ModelSpec, layer: int) -> dict[str, tuple[int, ...]]:
    prefix = f"model.layers.{layer}."
    hidden, q_size, kv_size = spec.hidden_size, spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    linears = {
        "self_attn.q_proj": (q_size, hidden, spec.qkv_bias),
        "self_attn.k_proj": (kv_size, hidden, spec.qkv_bias),
        "self_attn.v_proj": (kv_size, hidden, spec.qkv_bias),
        "self_attn.o_proj": (hidden, q_size, spec.o_bias),
        **_mlp_linears(spec, layer),
    }
    norms = {"input_layernorm": hidden, "post_attention_layernorm": hidden}
    if spec.post_norms:
        norms |= {"pre_feedforward_layernorm": hidden, "post_feedforward_layernorm": hidden}
    if spec.qk_norm:
        norms |= {"self_attn.q_norm": spec.head_dim, "self_attn.k_norm": spec.head_dim}
    shapes: dict[str, tuple[int, ...]] = {f"{prefix}{name}.weight": (size,) for name, size in norms.items()}
    for name, (rows, columns, has_bias) in linears.items():
        shapes[f"{prefix}{name}.weight"] = (rows, columns)
        if has_bias:
            shapes[f"{prefix}{name}.bias"] = (rows,)
    return shapes


def _mlp_linears(spec: ModelSpec, layer: int) -> dict[str, tuple[int, int, bool]]:
    """Rows, columns and whether there is a bias, by module; of all experts where the layer has some."""
    hidden, mixture = spec.hidden_size, spec.mixture
    if mixture is None or not mixture.sparse_layers[layer]:
        return {
            "mlp.gate_proj": (spec.intermediate_size, hidden, spec.mlp_bias),
            "mlp.up_proj": (spec.intermediate_size, hidden, spec.mlp_bias),
            "mlp.down_proj": (hidden, spec.intermediate_size, spec.mlp_bias),
        }
    linears = {mixture.router: (mixture.num_experts, hidden, False)}
    for gate, up, down in mixture.experts:
        linears |= dict.fromkeys((gate, up), (mixture.intermediate_size, hidden, False))
        linears[down] = (hidden, mixture.intermediate_size, False)
    return linears


class WeightSource:
    """Reads a model's weights from ``checkpoint``.

    Raises CheckpointError for a checkpoint that another tool quantized, and BuildError when a weight is missing, has
    another shape, or is one that the decoder would leave out.
    """

    def __init__(self, checkpoint: Checkpoint, spec: ModelSpec) -> None:
        from quantize import check_readable

        check_readable(checkpoint)
        self._checkpoint = checkpoint
        self.shapes = expected_weights(spec)
        self._norms_add_one = spec.norms_add_one
        self.kinds: set[tuple[str, int | None]] = set()  # scheme and group size of the matrices read so far
        names = set(checkpoint.names())
        missing = [name for name in self.shapes if name not in names]
        if missing:
            raise BuildError(f"{checkpoint.path}: {_some(missing)} missing; a {spec.model_type} model needs it")
        unused = [name for name in sorted(names - set(self.shapes)) if not _may_be_left(name, spec)]
        if unused:
            raise BuildError(
                f"{checkpoint.path}: a {spec.model_type} model has no {_some(unused)}; config and weights disagree"
            )

    @property
    def is_quantized(self) -> bool:
        return bool(self._checkpoint.config.get("quantization_config"))

    def matrix(self, name: str) -> QuantizedTensor:
        """An embedding or linear weight, [out_features, in_features], as it is stored."""
        return self.checked(name, self.stored(name))

    def stored(self, name: str) -> QuantizedTensor:
        """The same with nothing but its shape checked: of a mapped file, a view whose values are not read yet."""
        from quantize import load_weight

        weight = load_weight(self._checkpoint, name)
        self._check_shape(name, tuple(weight.shape))
        return weight

    def checked(self, name: str, weight: QuantizedTensor) -> QuantizedTensor:
        """``weight``, a stored one or a part of it, if its floats are finite."""
        self._check_finite(name, weight.scales if weight.scheme != "none" else weight.values)
        self._check_finite(name, weight.tensor_scale)
        self.kinds.add((weight.scheme, weight.group_size))
        return weight

    def vector(self, name: str) -> npt.NDArray[np.float32]:
        """A norm weight or bias, [features]; a norm's as it scales, whatever is stored."""
        values = self._checkpoint.load_float32(name)
        self._check_shape(name, values.shape)
        self._check_finite(name, values)
        return values + np.float32(1) if self._norms_add_one and name.endswith("norm.weight") else values

    def kv_scales(self, layer: int) -> tuple[str, npt.NDArray[np.float32], npt.NDArray[np.float32]] | None:
        """The scheme of the KV cache that the checkpoint was calibrated for, and the scales [] of keys and values."""
        section = (self._checkpoint.config.get("quantization_config") or {}).get("kv_cache")
        if section is None:
            return None
        scheme = section.get("scheme") if isinstance(section, dict) else None
        if scheme not in ("fp8", "int8"):
            raise BuildError(f"{self._checkpoint.path}: kv_cache is {section!r}, expected the scheme fp8 or int8")
        prefix = f"model.layers.{layer}.self_attn."
        key, value = (self._scale(prefix + name) for name in ("k_proj.k_scale", "v_proj.v_scale"))
        return scheme, key, value

    def _scale(self, name: str) -> npt.NDArray[np.float32]:
        values = self._checkpoint.load_float32(name)
        if values.shape != () or not np.isfinite(values) or values <= 0:
            raise BuildError(f"{self._checkpoint.path}: {name} is no positive number; quantize the model again")
        return values

    def _check_finite(self, name: str, values: npt.NDArray[Any] | None) -> None:
        from quantize.finite import all_finite

        if values is None:
            return
        if not all_finite(values):
            raise BuildError(
                f"{self._checkpoint.path}: {name} holds NaN or infinity; the checkpoint is damaged, get it again"
            )

    def _check_shape(self, name: str, found: tuple[int, ...]) -> None:
        if found != self.shapes[name]:
            raise BuildError(
                f"{self._checkpoint.path}: {name} has shape {found}; config.json makes it {self.shapes[name]}"
            )


def _may_be_left(name: str, spec: ModelSpec) -> bool:
    return name.endswith(_COMPANIONS + _IGNORED) or (spec.tie_word_embeddings and name == "lm_head.weight")


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
