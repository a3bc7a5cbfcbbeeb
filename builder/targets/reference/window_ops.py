"""Operations of one decoder layer over one whole window, which tell what the linears read."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from builder.model_spec import ModelSpec
from builder.network.ops import AttentionSpec
from builder.targets.reference.eager_ops import EagerOps
from builder.targets.reference.window_weights import WindowWeights
from plansmith_errors import BuildError

if TYPE_CHECKING:
    from torch import Tensor

Observe = Callable[[str, npt.NDArray[np.float32]], None]


class WindowOps(EagerOps):
    """NetworkOps[torch.Tensor] without a KV cache: a window is attended to from its own first token."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: WindowWeights,
        num_tokens: int,
        observe: Observe | None,
        observe_outputs: Observe | None = None,
    ) -> None:
        import torch

        super().__init__(spec, weights, num_tokens)
        self._products = weights
        self.positions = torch.arange(num_tokens)
        self._observe, self._observe_outputs = observe, observe_outputs

    def linear(self, x: Tensor, weight: str, bias: str | None = None) -> Tensor:
        if self._observe is not None:
            self._observe(weight, x.numpy())
        outputs = self._products.multiply(x, weight)
        if self._observe_outputs is not None:
            self._observe_outputs(weight, outputs.numpy())
        return outputs if bias is None else outputs + self._weights[bias]

    def forget_copies(self) -> None:
        """Of weights; those that are multiplied with again are made again."""
        self._products.forget_copies()

    def paged_attention(self, q: Tensor, k: Tensor, v: Tensor, attention: AttentionSpec) -> Tensor:
        """Torch's own kernel: in blocks, so that no matrix of all scores is ever held."""
        from torch.nn import functional

        if self._observe is not None:
            prefix = f"model.layers.{attention.layer}.self_attn."
            self._observe(f"{prefix}k_proj.k_scale", k.numpy())
            self._observe(f"{prefix}v_proj.v_scale", v.numpy())
        if attention.soft_cap is not None:
            group = attention.num_heads // attention.num_kv_heads
            k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        if attention.soft_cap is not None:
            return _soft_capped(q, k, v, self.positions, attention)
        window = attention.sliding_window
        mask = None if window is None or window >= len(self.positions) else _sliding_mask(self.positions, window)
        attended = functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=attention.scale, enable_gqa=True
        )
        return attended[0].transpose(0, 1).flatten(1)

    def embedding(self, weight: str) -> Tensor:
        raise outside_a_layer("embedding")

    def gather_logits_rows(self, x: Tensor) -> Tensor:
        raise outside_a_layer("gather_logits_rows")


def _soft_capped(q: Tensor, k: Tensor, v: Tensor, positions: Tensor, attention: AttentionSpec) -> Tensor:
    """Head by head, as torch's kernel has no such cap: [1, num_heads, num_tokens, head_dim] to [num_tokens, ...]."""
    import torch

    cap = attention.soft_cap or 0.0
    hidden = ~_sliding_mask(positions, attention.sliding_window or len(positions))
    outputs = []
    for head in range(q.shape[1]):
        scores = cap * ((q[0, head] @ k[0, head].T) * (attention.scale / cap)).tanh()
        outputs.append(scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v[0, head])
    return torch.cat(outputs, dim=-1)


def _sliding_mask(positions: Tensor, window: int) -> Any:
    distance = positions[:, None] - positions
    return (distance >= 0) & (distance < window)


def outside_a_layer(operation: str) -> BuildError:
    """What an operation raises that belongs to the whole model."""
    return BuildError(f"{operation} belongs to no decoder layer; a window is run layer by layer")
