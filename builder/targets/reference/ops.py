"""NetworkOps as eager torch operations in float32, over a plain paged KV cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from builder.model_spec import ModelSpec
from builder.network.ops import AttentionSpec
from builder.network.weights import DecoderWeights
from builder.targets.reference.batch import Batch
from builder.targets.reference.eager_ops import EagerOps
from builder.targets.reference.input_rounding import InputRounding, input_rounding, kv_roundings

if TYPE_CHECKING:
    from torch import Tensor


class TorchOps(EagerOps):
    """Implements NetworkOps[torch.Tensor]. ``batch`` is set before each step."""

    def __init__(self, spec: ModelSpec, weights: DecoderWeights, *, num_slots: int, max_seq_len: int) -> None:
        import torch

        tensors: dict[str, Tensor] = {}
        inputs: dict[str, InputRounding] = {}
        for name, shape in weights.shapes.items():
            if len(shape) == 1:
                tensors[name] = _tensor(weights.vector(name))
                continue
            weight = weights.matrix(name)
            tensors[name] = _tensor(weight.dequantize())
            rounding = input_rounding(weight)
            if rounding is not None:
                inputs[name] = rounding
        super().__init__(spec, tensors, max_seq_len, inputs)
        self._kv_roundings = [kv_roundings(weights, layer) for layer in range(spec.num_layers)]
        # A slot is one token's place: block number * tokens_per_block + offset.
        shape = (spec.num_layers, num_slots, spec.num_kv_heads, spec.head_dim)
        self._keys, self._values = torch.zeros(shape), torch.zeros(shape)

    @property
    def batch(self) -> Batch:
        return self._batch

    @batch.setter
    def batch(self, batch: Batch) -> None:
        self._batch = batch
        self.positions = batch.position_ids

    def embedding(self, weight: str) -> Tensor:
        return self._weights[weight][self.batch.input_ids]

    def paged_attention(self, q: Tensor, k: Tensor, v: Tensor, attention: AttentionSpec) -> Tensor:
        import torch

        keys, values = self._keys[attention.layer], self._values[attention.layer]
        round_key, round_value = self._kv_roundings[attention.layer]
        keys[self.batch.new_slots] = round_key(k)
        values[self.batch.new_slots] = round_value(v)
        outputs = [
            _attend(q[sequence.queries], keys[sequence.slots], values[sequence.slots], sequence.past_len, attention)
            for sequence in self.batch.sequences
        ]
        return torch.cat(outputs)

    def gather_logits_rows(self, x: Tensor) -> Tensor:
        return x[self.batch.logits_indices]


def _attend(q: Tensor, k: Tensor, v: Tensor, past_len: int, attention: AttentionSpec) -> Tensor:
    """Softmax attention of one sequence: q [new, num_heads, head_dim], k and v [past + new, num_kv_heads, head_dim]."""
    import torch

    group = attention.num_heads // attention.num_kv_heads
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * attention.scale
    if attention.soft_cap is not None:
        scores = attention.soft_cap * (scores / attention.soft_cap).tanh()
    distance = (past_len + torch.arange(len(q)))[:, None] - torch.arange(len(k))
    hidden = distance < 0
    if attention.sliding_window is not None:
        hidden |= distance >= attention.sliding_window
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v).flatten(1)


def _tensor(values: npt.NDArray[np.float32]) -> Tensor:
    """A copy: a memory map is not writable, and torch warns of that."""
    import torch

    return torch.from_numpy(np.array(values, np.float32, order="C"))
