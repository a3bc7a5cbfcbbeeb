"""What a user sees of a quantization that was stopped: nothing under the final name, and then the whole of it."""

from __future__ import annotations

import json
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from plansmith.store import open_store

SIZE = 512


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source"
    path.mkdir()
    config = {
        "model_type": "llama",
        "hidden_size": SIZE,
        "intermediate_size": SIZE,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "vocab_size": SIZE,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
    }
    (path / "config.json").write_text(json.dumps(config))
    weights = {"model.embed_tokens": (SIZE, SIZE), "model.norm": (SIZE,)}
    for layer in range(2):
        linears = [f"self_attn.{name}_proj" for name in "qkvo"] + [
            f"mlp.{name}_proj" for name in ("gate", "up", "down")
        ]
        weights |= {f"model.layers.{layer}.{name}": (SIZE, SIZE) for name in linears}
        weights |= {f"model.layers.{layer}.{name}": (SIZE,) for name in ("input_layernorm", "post_attention_layernorm")}
    rng = np.random.default_rng(0)
    tensors = {f"{name}.weight": rng.normal(0, 1, shape).astype(np.float32) for name, shape in weights.items()}
    save_file(tensors, path / "model.safetensors")
    return path


def run(source: Path, output: Path, prepare: Callable[[], None] | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "plansmith", "quantize", str(source), "-o", str(output), "--recipe", "fp8"]
    return subprocess.run(command, capture_output=True, text=True, preexec_fn=prepare)


def only_two_megabytes() -> None:
    """Files that may not grow stand for a disk that is full."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2 * 10**6, 2 * 10**6))


def test_a_full_disk_is_one_line_and_the_next_run_goes_on(source: Path, tmp_path: Path) -> None:
    assert run(source, tmp_path / "whole").returncode == 0
    full = run(source, tmp_path / "out", only_two_megabytes)
    assert full.returncode == 2 and full.stderr.count("\n") == 1 and full.stdout == ""
    assert "File too large; what is finished is kept, run it again to go on" in full.stderr
    assert not (tmp_path / "out").exists()
    again = run(source, tmp_path / "out")
    assert again.returncode == 0 and "of 20 tensors were finished" in again.stderr
    assert {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()} == {
        file.name: file.read_bytes() for file in (tmp_path / "whole").iterdir()
    }
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source", "whole"]


def test_a_source_that_changed_starts_anew(source: Path, tmp_path: Path) -> None:
    assert run(source, tmp_path / "out", only_two_megabytes).returncode == 2
    (source / "generation_config.json").write_text("{}")
    again = run(source, tmp_path / "out")
    assert again.returncode == 0 and "cannot be continued by this run; starting anew" in again.stderr
    assert (tmp_path / "out" / "generation_config.json").exists()


def test_a_store_keeps_an_unfinished_stage_that_can_be_continued_until_others_are_asked_for(tmp_path: Path) -> None:
    def produce(recipe: str, *, fail: bool) -> Callable[[Path], None]:
        def write(payload: Path) -> None:
            found = sorted(file.name for file in payload.iterdir())
            state = tmp_path / f".quantize-{store.key({'recipe': recipe})}.resume"
            assert state == store.resume_state("quantize", {"recipe": recipe})
            state.mkdir(exist_ok=True)
            (payload / f"part{len(found)}").write_bytes(b"x")
            if fail:
                raise KeyboardInterrupt

        return write

    with open_store(tmp_path) as store, pytest.raises(KeyboardInterrupt):
        store.make("quantize", {"recipe": "fp8"}, produce("fp8", fail=True))
    with open_store(tmp_path) as store:
        finished = store.make("quantize", {"recipe": "fp8"}, produce("fp8", fail=False))
    assert sorted(file.name for file in finished.payload.iterdir()) == ["part0", "part1"]
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]
    with open_store(tmp_path) as store, pytest.raises(KeyboardInterrupt):
        store.make("quantize", {"recipe": "int4"}, produce("int4", fail=True))
    with open_store(tmp_path) as store:
        store.make("quantize", {"recipe": "int8"}, produce("int8", fail=False))
        assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]
