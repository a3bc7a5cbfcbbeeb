"""Random tiny models of each family, and how to push sequences through an engine in chunks."""

import math
from pathlib import Path

import numpy as np
import torch
import transformers

from plugins.inflight_batching.step import StepInputs

VOCAB_SIZE = 96
SEQ_LEN = 100

_SHAPE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,  # logits of the size real models have; the default gives next to nothing
    "bos_token_id": 1,
    "eos_token_id": 2,
}


MIXTURES = {  # of experts: (model type, settings)
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "mixtral, sliding window": (
        "mixtral",
        {"num_local_experts": 5, "num_experts_per_tok": 3, "sliding_window": 37, "tie_word_embeddings": True},
    ),
    "qwen3_moe": (
        "qwen3_moe",
        {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True},
    ),
    "qwen3_moe, one dense layer": (
        "qwen3_moe",
        {
            "num_experts": 6,
            "num_experts_per_tok": 1,
            "moe_intermediate_size": 64,
            "decoder_sparse_step": 2,
            "head_dim": 24,
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 24,
        },
    ),
    "qwen3_moe, first layer dense": (
        "qwen3_moe",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "mlp_only_layers": [0]},
    ),
}


_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0 + 0.1 * i for i in range(6)],
    "long_factor": [1.0 + 0.7 * i for i in range(6)],
}
_GEMMA3_ROPES = {
    "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
}
_GEMMA = {"sliding_window": 24, "head_dim": 24, "query_pre_attn_scalar": 20}
PHI3 = ("phi3", {"pad_token_id": 0, "sliding_window": 37})
GEMMA2 = ("gemma2", _GEMMA | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0})
GEMMA3 = (
    "gemma3_text",
    _GEMMA
    | {
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": _GEMMA3_ROPES,
    },
)
GRANITE = (
    "granite",
    {
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.4,
        "residual_multiplier": 0.3,
        "logits_scaling": 0.5,
        "attention_bias": True,
        "mlp_bias": True,
    },
)
FAMILIES_WITH_TRAITS = {  # one model of each, with everything that it adds: (model type, settings)
    "phi3": PHI3,
    "gemma2": GEMMA2,
    "gemma3": GEMMA3,
    "granite": GRANITE,
}
TRAITS = FAMILIES_WITH_TRAITS | {
    "phi3, longrope on a part of each head": (
        "phi3",
        {
            "pad_token_id": 0,
            "tie_word_embeddings": True,
            "rope_parameters": _LONGROPE,
            "original_max_position_embeddings": 64,  # 100 tokens: transformers takes the long factors
        },
    ),
    "gemma2, no caps, wide heads": (
        "gemma2",
        {
            "head_dim": 256,
            "attention_bias": True,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "tie_word_embeddings": False,
        },
    ),
    "gemma3, logits capped": ("gemma3_text", _GEMMA | {"final_logit_softcapping": 3.0, "num_key_value_heads": 1}),
    "granite, tied": ("granite", {"tie_word_embeddings": True, "logits_scaling": 4.0, "initializer_range": 0.4}),
}


def save_model(path: Path, family: str, **settings):
    """Save a random float32 model to ``path`` as transformers does; return it."""
    config = transformers.AutoConfig.for_model(family, **(_SHAPE | settings))
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(".bias") or "norm" in name:  # transformers starts these at 0 and 1, which hides mistakes
                parameter.add_(0.3 * torch.randn_like(parameter))
    model.save_pretrained(path)
    return model


def expected_logits(model, ids: np.ndarray) -> np.ndarray:
    """Logits of transformers for every position: [num_seqs, num_tokens, vocab_size]."""
    with torch.inference_mode():
        return model(torch.from_numpy(ids)).logits.numpy()


def random_ids(num_seqs: int = 3, num_tokens: int = SEQ_LEN, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCAB_SIZE, (num_seqs, num_tokens))


def make_step(chunks, tables, tokens_per_block: int) -> StepInputs:
    """``chunks``: (ids, past_len) of each sequence; ``tables``: its physical blocks. Logits of every token."""
    ends = [past_len + len(ids) for ids, past_len in chunks]
    used = [table[: math.ceil(end / tokens_per_block)] for table, end in zip(tables, ends, strict=True)]
    starts = np.cumsum([0, *(len(ids) for ids, _ in chunks)]).astype(np.int32)
    return StepInputs(
        input_ids=np.concatenate([ids for ids, _ in chunks]).astype(np.int64),
        position_ids=np.concatenate([np.arange(past, past + len(ids)) for ids, past in chunks]).astype(np.int64),
        query_starts=starts,
        past_lens=np.array([past for _, past in chunks], np.int32),
        block_indices=np.concatenate(used).astype(np.int32),
        block_begins=np.cumsum([0, *map(len, used)]).astype(np.int32),
        logits_indices=np.arange(starts[-1], dtype=np.int64),
    )


def run_mixed(engine, ids: np.ndarray, seed: int = 1) -> np.ndarray:
    """All logits of ``ids`` in random ragged steps: prefill chunks and decodes mixed, over scattered blocks."""
    rng = np.random.default_rng(seed)
    size = engine.limits.tokens_per_block
    tables = rng.permutation(engine.limits.num_blocks).reshape(len(ids), -1)
    done, rows = [0] * len(ids), [[] for _ in ids]
    while min(done) < ids.shape[1]:
        takes = {i: min(int(rng.choice([0, 1, 1, 7, 40])), ids.shape[1] - done[i]) for i in range(len(ids))}
        active = [i for i, take in takes.items() if take]
        if not active:
            continue
        chunks = [(ids[i, done[i] : done[i] + takes[i]], done[i]) for i in active]
        step = make_step(chunks, [tables[i] for i in active], size)
        logits = engine.step(step).copy()
        for row, i in enumerate(active):
            rows[i].append(logits[step.query_starts[row] : step.query_starts[row + 1]])
            done[i] += takes[i]
    return np.stack([np.concatenate(parts) for parts in rows])
