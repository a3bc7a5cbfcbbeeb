"""Operations of a network in eager torch and float32, whatever its attention is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from builder.model_spec import ModelSpec
from builder.rope import rope_frequencies
from builder.targets.reference.input_rounding import InputRounding
from builder.targets.reference.moe import mix_experts, route
from plansmith_errors import BuildError

if TYPE_CHECKING:
    from torch import Tensor


class EagerOps:
    """The part of NetworkOps[torch.Tensor] that needs no KV cache. ``positions``, int64 [num_tokens], is set first."""

    positions: Tensor

    def __init__(
        self,
        spec: ModelSpec,
        weights: Mapping[str, Tensor],
        max_seq_len: int,
        inputs: Mapping[str, InputRounding] | None = None,
    ) -> None:
        """``inputs``: what happens to the inputs of linears, by the names of their weights."""
        import torch

        self._spec = spec
        self._weights = weights
        self._inputs = inputs or {}
        self._ropes = {  # by their parameters: all layers have one, or a few of them
            rope: (torch.from_numpy(inverse), factor)
            for rope in {spec.rope, spec.local_rope or spec.rope}
            for inverse, factor in [rope_frequencies(rope, spec.head_dim, max_seq_len)]
        }

    def linear(self, x: Tensor, weight: str, bias: str | None = None) -> Tensor:
        from torch.nn import functional

        rounding = self._inputs.get(weight)
        x = x if rounding is None else rounding(x)
        return functional.linear(x, self._weights[weight], None if bias is None else self._weights[bias])

    def row_linear(self, x: Tensor, weight: str, bias: str | None = None) -> Tensor:
        return self.linear(x, weight, bias)

    def lm_head(self, x: Tensor, weight: str) -> Tensor:
        return self.linear(x, weight)

    def rms_norm(self, x: Tensor, weight: str, eps: float) -> Tensor:
        import torch

        inverse = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
        return x * inverse * self._weights[weight]

    def split_heads(self, x: Tensor, num_heads: int) -> Tensor:
        return x.reshape(x.shape[0], num_heads, -1)

    def rope(self, x: Tensor, layer: int) -> Tensor:
        import torch

        inverse, factor = self._ropes[self._spec.rope_of(layer)]
        angles = torch.outer(self.positions.float(), inverse).repeat(1, 2)[:, None]
        turning, kept = x[..., : angles.shape[-1]], x[..., angles.shape[-1] :]
        lower, upper = turning.chunk(2, dim=-1)
        rotated = torch.cat([-upper, lower], dim=-1)
        turned = (turning * angles.cos() + rotated * angles.sin()) * factor
        return torch.cat([turned, kept], dim=-1) if kept.shape[-1] else turned

    def add(self, a: Tensor, b: Tensor) -> Tensor:
        return a + b

    def multiply(self, a: Tensor, b: Tensor) -> Tensor:
        return a * b

    def silu(self, x: Tensor) -> Tensor:
        from torch.nn import functional

        return functional.silu(x)

    def gelu_tanh(self, x: Tensor) -> Tensor:
        from torch.nn import functional

        return functional.gelu(x, approximate="tanh")

    def scale(self, x: Tensor, factor: float) -> Tensor:
        return x * factor

    def soft_cap(self, x: Tensor, cap: float) -> Tensor:
        return cap * (x / cap).tanh()

    def route(self, scores: Tensor, experts_per_token: int, *, normalizes: bool) -> Tensor:
        return route(scores, experts_per_token, normalizes=normalizes)

    def columns(self, x: Tensor, begin: int, end: int) -> Tensor:
        return x[:, begin:end]

    def mix_experts(self, x: Tensor, shares: Tensor, experts: Sequence[Callable[[Tensor], Tensor]]) -> Tensor:
        return mix_experts(x, shares, experts)

    def receive_hidden(self) -> Tensor:
        raise _one_stage()

    def send_hidden(self, x: Tensor) -> Tensor:
        raise _one_stage()


def _one_stage() -> BuildError:
    return BuildError("this target computes the whole model on one rank; set build.pp_size to 1")
