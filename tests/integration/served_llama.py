"""A tiny llama to serve, and what tests ask of a running server."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil

from triton_repo import TritonServer

PROMPTS = [
    "The old sailor looked at the sea",
    "In the morning the baker",
    "Nobody knew why",
    "A letter came from far away, and it said that",
    "Rain",
    "When the train stopped between two stations, the children",
    "It was the best bread in town",
    "The moon and the lamp",
]
GREEDY = {"temperature": 0, "ignore_eos": True}


def write_tiny_llama(directory: Path, *, head_dim: int = 16, seed: int = 7) -> None:
    """A checkpoint in Hugging Face's layout with random weights, and a BPE tokenizer trained on the prompts."""
    from safetensors.numpy import save_file
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=320, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet)
    tokenizer.train_from_iterator(PROMPTS * 4, trainer)
    tokenizer.save(str(directory / "tokenizer.json"))
    vocab, hidden, inner, layers, heads, kv_heads = tokenizer.get_vocab_size(), 64, 128, 2, 4, 2
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "torch_dtype": "float32",
    }
    (directory / "config.json").write_text(json.dumps(config))
    rng = np.random.default_rng(seed)

    def weight(*shape: int) -> np.ndarray:
        return (rng.standard_normal(shape) * (2.0 / shape[-1]) ** 0.5).astype(np.float32)

    tensors = {
        "model.embed_tokens.weight": weight(vocab, hidden),
        "lm_head.weight": weight(vocab, hidden),
        "model.norm.weight": np.ones(hidden, np.float32),
    }
    for layer in range(layers):
        name = f"model.layers.{layer}"
        tensors |= {
            f"{name}.self_attn.q_proj.weight": weight(heads * head_dim, hidden),
            f"{name}.self_attn.k_proj.weight": weight(kv_heads * head_dim, hidden),
            f"{name}.self_attn.v_proj.weight": weight(kv_heads * head_dim, hidden),
            f"{name}.self_attn.o_proj.weight": weight(hidden, heads * head_dim),
            f"{name}.mlp.gate_proj.weight": weight(inner, hidden),
            f"{name}.mlp.up_proj.weight": weight(inner, hidden),
            f"{name}.mlp.down_proj.weight": weight(hidden, inner),
            f"{name}.input_layernorm.weight": np.ones(hidden, np.float32),
            f"{name}.post_attention_layernorm.weight": np.ones(hidden, np.float32),
        }
    save_file(tensors, str(directory / "model.safetensors"))


def start(repository: Path, **settings: object) -> TritonServer:
    return TritonServer(repository, http_port=0, grpc_port=0, metrics_port=0, **settings)  # type: ignore[arg-type]


def descendants(server: TritonServer) -> list[psutil.Process]:
    return psutil.Process(server.pid).children(recursive=True)


def engine_process(server: TritonServer) -> psutil.Process:
    return next(p for p in descendants(server) if "triton_repo.backend.engine_process" in p.cmdline())


def metrics(server: TritonServer) -> dict[str, float]:
    with urllib.request.urlopen(server.metrics_url) as response:
        lines = response.read().decode().splitlines()
    return {line.split("{")[0]: float(line.split()[-1]) for line in lines if line.startswith("plansmith_")}


def wait_until(condition: Callable[[], bool], timeout: float = 30.0) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)


def post(server: TritonServer, endpoint: str, **body: object) -> tuple[int, dict[str, object]]:
    request = urllib.request.Request(
        f"{server.http_url}/v2/models/{server.model_name}/{endpoint}", data=json.dumps(body).encode()
    )
    try:
        with urllib.request.urlopen(request) as response:
            return response.status, json.loads(response.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())
