"""Over how many ranks a model can be spread, and the one line that says why not."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from planning import precision
from tiny_models import save_model

import quantize
from builder.model_spec import ModelSpec
from builder.network.weights import WeightSource
from builder.parallel import Parallelism
from builder.planner.from_spec import shape_of_spec
from builder.planner.legality import obstacle
from builder.sharding.legality import check_parallelism, legal_tp_sizes
from plansmith_errors import BuildError
from quantize.recipe import Recipe

SMOLLM2: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
LLAMA_70B = {
    **SMOLLM2,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}
MIXTRAL = {
    **SMOLLM2,
    "model_type": "mixtral",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}


def refusal(config: dict[str, Any], **sizes: int) -> str:
    with pytest.raises(BuildError) as caught:
        check_parallelism(ModelSpec.from_hf_config(config), Parallelism(**sizes))
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("config", "sizes"),
    [
        (SMOLLM2, {"tp_size": 3, "pp_size": 30}),
        (LLAMA_70B, {"tp_size": 8, "pp_size": 3}),
        (LLAMA_70B, {"tp_size": 32}),  # four ranks have the same head of keys and values
        (MIXTRAL, {"tp_size": 8, "ep_size": 8}),
        (MIXTRAL, {"tp_size": 8, "pp_size": 2, "ep_size": 2}),
    ],
)
def test_what_is_legal_passes(config, sizes):
    check_parallelism(ModelSpec.from_hf_config(config), Parallelism(**sizes))


@pytest.mark.parametrize(
    ("config", "sizes", "expected"),
    [
        (SMOLLM2, {"tp_size": 2}, "tp_size is 2: num_attention_heads 9 is no multiple of it; legal tp_size: 1, 3"),
        (
            {**LLAMA_70B, "num_key_value_heads": 4, "num_attention_heads": 48, "head_dim": 128},
            {"tp_size": 6},
            "num_key_value_heads 4 is neither a multiple nor a divisor of it; legal tp_size: 1, 2, 4, 8, 16",
        ),
        (
            {**LLAMA_70B, "vocab_size": 128257},
            {"tp_size": 2},
            "vocab_size 128257 is no multiple of it; legal tp_size: 1",
        ),
        ({**LLAMA_70B, "intermediate_size": 28674}, {"tp_size": 4}, "intermediate_size 28674 is no multiple of it"),
        (SMOLLM2, {"pp_size": 31}, "pp_size is 31, but the model has 30 layers; expected 1 to 30"),
        (SMOLLM2, {"tp_size": 0}, "tp_size is 0; expected 1 or more"),
        (SMOLLM2, {"tp_size": 3, "ep_size": 3}, "ep_size is 3: the model has no experts; legal ep_size: 1"),
        (MIXTRAL, {"tp_size": 4, "ep_size": 8}, "it does not divide tp_size, which is 4; legal ep_size: 1, 2, 4"),
        (
            {**MIXTRAL, "num_local_experts": 6},
            {"tp_size": 4, "ep_size": 4},
            "the model's 6 experts are no multiple of it; legal ep_size: 1, 2",
        ),
        (
            {**MIXTRAL, "intermediate_size": 14340},
            {"tp_size": 16, "ep_size": 2},
            "the experts' intermediate size 14340 is no multiple of tp_size / ep_size; legal tp_size: 2, 4, 8",
        ),
    ],
)
def test_what_is_not_is_refused_with_what_would_be(config, sizes, expected):
    assert expected in refusal(config, **sizes)


@pytest.mark.parametrize(
    ("linears", "legal"),
    [
        ({"scheme": "none"}, [1, 2, 4, 8]),
        ({"scheme": "int8"}, [1, 2, 4, 8]),
        ({"scheme": "int4", "group_size": 64}, [1, 2]),  # 384 / 4 is a group and a half
        ({"scheme": "int4", "group_size": 32}, [1, 2, 4]),  # of attention's 128 columns, half a group is one's own
        ({"scheme": "fp8", "granularity": "block"}, [1]),  # 384 are three blocks
        ({"scheme": "nvfp4"}, [1, 2, 4, 8]),
        ({"scheme": "mxfp8"}, [1, 2, 4]),  # half a block of 32 is none
    ],
)
def test_no_rank_gets_a_part_of_a_block_of_scales(tmp_path, linears, legal):
    save_model(tmp_path / "source", "llama", num_attention_heads=8, hidden_size=128, intermediate_size=384)
    recipe = Recipe.model_validate({"name": "test", "linears": linears})
    quantize.quantize_checkpoint(tmp_path / "source", tmp_path / "out", recipe)
    checkpoint = quantize.open_checkpoint(tmp_path / "out")
    spec = ModelSpec.from_hf_config(checkpoint.config)
    weights = WeightSource(checkpoint, spec)
    assert legal_tp_sizes(spec, weights) == legal
    assert legal_tp_sizes(spec) == [1, 2, 4, 8]
    if 8 not in legal:
        expected = f"tp_size is 8: it leaves each rank .* tears its .*; legal tp_size: {', '.join(map(str, legal))}$"
        with pytest.raises(BuildError, match=expected):
            check_parallelism(spec, Parallelism(8), weights)


@given(
    heads=st.sampled_from([4, 6, 9, 12, 16]),
    group=st.sampled_from([1, 2, 3, 4]),
    vocabulary=st.sampled_from([96, 100, 1024]),
    inner=st.sampled_from([96, 120, 256]),
    experts=st.sampled_from([0, 2, 6, 8]),
    sizes=st.tuples(*[st.sampled_from([1, 2, 3, 4, 6, 8, 12])] * 3),
)
def test_what_is_planned_can_be_built_and_what_can_be_built_is_planned(heads, group, vocabulary, inner, experts, sizes):
    config = {
        **(MIXTRAL if experts else LLAMA_70B),
        "num_attention_heads": heads,
        "num_key_value_heads": heads // group if heads % group == 0 else heads,
        "head_dim": 64,
        "vocab_size": vocabulary,
        "intermediate_size": inner,
        "num_hidden_layers": 6,
        **({"num_local_experts": experts} if experts else {}),
    }
    spec, parallelism = ModelSpec.from_hf_config(config), Parallelism(*sizes)
    try:
        check_parallelism(spec, parallelism)
        can_be_built = True
    except BuildError:
        can_be_built = False
    assert (obstacle(shape_of_spec(spec), precision("fp16"), parallelism) is None) == can_be_built
