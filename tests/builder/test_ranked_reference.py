"""A model spread over ranks computes what it computes on one: tensor, pipeline and expert parallel, step by step."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tiny_models import FAMILIES_WITH_TRAITS, VOCAB_SIZE, random_ids, run_mixed, save_model

import builder
import quantize
from builder.parallel import Parallelism
from builder.targets.reference.ranks import RankedReference
from plansmith_errors import BuildError
from plugins.inflight_batching.step import EngineLimits
from quantize.recipe import Recipe

LIMITS = EngineLimits(
    max_batch_size=4, max_num_tokens=512, max_seq_len=256, tokens_per_block=32, num_blocks=12, vocab_size=VOCAB_SIZE
)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("mistral", {"sliding_window": 37}),
    "qwen2": ("qwen2", {"num_hidden_layers": 3, "tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"head_dim": 24}),
    **FAMILIES_WITH_TRAITS,
}
MIXTURES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "mlp_only_layers": [1]},
}
SPLITS = [Parallelism(tp, pp) for tp in (1, 2, 4) for pp in (1, 2) if tp * pp > 1]
EXPERT_SPLITS = [Parallelism(2, 1, 2), Parallelism(4, 1, 2), Parallelism(4, 1, 4), Parallelism(2, 2, 2)]


def difference(path: Any, parallelism: Parallelism) -> float:
    """Of the logits of all tokens in random ragged steps, relative to their spread."""
    ids = random_ids()
    expected = run_mixed(builder.load_reference(path, num_blocks=LIMITS.num_blocks), ids)
    found = run_mixed(RankedReference(path, parallelism, LIMITS), ids)
    assert (found.argmax(-1) == expected.argmax(-1)).mean() > 0.999
    return float(np.abs(found - expected).max() / expected.std())


@pytest.mark.parametrize("parallelism", SPLITS, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_dense_models(tmp_path, family, parallelism):
    model_type, settings = FAMILIES[family]
    save_model(tmp_path, model_type, **settings)
    assert difference(tmp_path, parallelism) < 1e-4


@pytest.mark.parametrize("parallelism", [*SPLITS, *EXPERT_SPLITS], ids=str)
@pytest.mark.parametrize("family", MIXTURES)
def test_models_with_experts(tmp_path, family, parallelism):
    save_model(tmp_path, family, **MIXTURES[family])
    assert difference(tmp_path, parallelism) < 1e-4


@pytest.mark.parametrize(
    "linears",
    [
        {"scheme": "int4", "group_size": 32, "symmetric": False},
        {"scheme": "int8"},
        {"scheme": "fp8", "granularity": "block"},
        {"scheme": "nvfp4"},
        {"scheme": "mxfp8"},
    ],
    ids=lambda linears: linears["scheme"],
)
def test_quantized_weights(tmp_path, linears):
    save_model(tmp_path / "source", "llama", hidden_size=256, intermediate_size=512)
    recipe = Recipe.model_validate({"name": "test", "linears": linears})
    quantize.quantize_checkpoint(tmp_path / "source", tmp_path / "out", recipe)
    assert difference(tmp_path / "out", Parallelism(4, 2)) < 1e-4


def test_a_split_that_is_not_legal_is_refused(tmp_path):
    save_model(tmp_path, "llama")
    with pytest.raises(BuildError, match="num_attention_heads 4 is no multiple of it; legal tp_size: 1, 2, 4"):
        RankedReference(tmp_path, Parallelism(3), LIMITS)
