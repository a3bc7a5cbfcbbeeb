"""Experts in eager torch: each computes the tokens that were given to it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def route(scores: Tensor, experts_per_token: int, *, normalizes: bool) -> Tensor:
    """[num_tokens, num_experts] to shares of the same shape, 0 for the experts that were not chosen."""
    import torch

    values, chosen = scores.softmax(-1).topk(experts_per_token, dim=-1)
    if normalizes:
        values = values / values.sum(-1, keepdim=True)
    return torch.zeros_like(scores).scatter(-1, chosen, values)


def mix_experts(x: Tensor, shares: Tensor, experts: Sequence[Callable[[Tensor], Tensor]]) -> Tensor:
    """``x`` [num_tokens, hidden_size] and ``shares`` [num_tokens, num_experts] to the shape of ``x``."""
    import torch

    mixed = torch.zeros_like(x)
    for expert, own in zip(experts, shares.T, strict=True):
        (rows,) = own.nonzero(as_tuple=True)
        if len(rows):
            mixed.index_add_(0, rows, expert(x[rows]) * own[rows, None])
    return mixed


def rows_of(shares: Tensor, expert: int) -> Tensor:
    """The tokens [num_chosen] that were given to ``expert``."""
    return shares[:, expert].nonzero(as_tuple=True)[0]


def mix_outputs(x: Tensor, shares: Tensor, outputs: Sequence[Tensor]) -> Tensor:
    """As ``mix_experts``, of what each expert made of its tokens: ``outputs`` [num_chosen, hidden_size]."""
    import torch

    mixed = torch.zeros_like(x)
    for expert, output in enumerate(outputs):
        rows = rows_of(shares, expert)
        mixed.index_add_(0, rows, output * shares[rows, expert, None])
    return mixed
