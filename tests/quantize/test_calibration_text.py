"""Calibration text: what can be given, which tokens are taken, and what a text that will not do is told."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import quantize
from plansmith_errors import QuantizeError
from quantize.calibration.estimate import LayerShape, check_limit, estimate_cost
from quantize.calibration.hidden_states import HiddenStates
from quantize.calibration.text import read_documents
from quantize.calibration.windows import choose_windows
from quantize.recipe import Recipe

CALIBRATED = Recipe.model_validate(
    {"name": "t", "linears": {"scheme": "int4", "group_size": 32, "method": "importance"}}
)


def test_the_text_that_ships_is_plain_and_long_enough() -> None:
    (text,) = read_documents(quantize.calibration_file(None), None)
    assert 35_000 < len(text) < 45_000 and text.isascii()


def test_json_lines_hold_texts_and_chat_turns(tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl"
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
    path.write_text(json.dumps({"text": "a\nb\u2028c"}) + "\n\n" + json.dumps({"messages": turns}) + "\n")
    documents = read_documents(path, lambda messages: "|".join(str(turn["content"]) for turn in messages))
    assert documents == ["a\nb\u2028c", "Hi|Ho"]
    with pytest.raises(QuantizeError, match=r"c.jsonl, line 3: holds chat turns"):
        read_documents(path, None)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"\xff\xfe", "is not UTF-8"),
        ("a.jsonl", b"{", "line 1: not valid JSON"),
        ("a.jsonl", b'{"text": 3}', r'line 1: expected \{"text": "..."\} or'),
        ("a.jsonl", b'{"messages": ["a"]}', "line 1: expected"),
        ("a.jsonl", b"[]", "line 1: expected"),
    ],
)
def test_a_wrong_text_is_explained_in_one_line(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(QuantizeError, match=message) as caught:
        read_documents(tmp_path / name, None)
    assert "\n" not in str(caught.value)


def test_a_missing_text_is_named(tmp_path: Path) -> None:
    with pytest.raises(QuantizeError, match=r"absent\.txt: No such file"):
        read_documents(tmp_path / "absent.txt", None)


def test_windows_are_pieces_of_the_text_chosen_by_the_seed() -> None:
    ids = np.arange(1000)
    windows = choose_windows(ids, 5, 30, seed=3, source="t")
    assert windows.shape == (5, 30)
    assert (np.diff(windows[:, 0]) >= 30).all() and (windows[:, 0] % 30 == 0).all()
    assert (windows == windows[:, :1] + np.arange(30)).all()
    np.testing.assert_array_equal(windows, choose_windows(ids, 5, 30, seed=3, source="t"))
    assert not np.array_equal(windows, choose_windows(ids, 5, 30, seed=4, source="t"))


def test_too_little_text_is_told_what_would_do() -> None:
    with pytest.raises(QuantizeError, match=r"has 100 tokens, 4 samples of 30 need 120; .*num_samples 3 and "):
        choose_windows(np.arange(100), 4, 30, seed=0, source="t")


def test_the_cost_grows_with_the_tokens_and_a_limit_names_a_sample_that_fits() -> None:
    layers = [LayerShape(((64, 64), (64, 32), (128, 32), (32, 64)), "gptq")] * 2
    small, large = (estimate_cost(layers, 32, num_samples, 16, 1e9) for num_samples in (10, 100))
    assert large.flops > 5 * small.flops and large.num_tokens == 1600
    assert small.disk_bytes == 0 and estimate_cost(layers, 32, 10, 16, 0.0).disk_bytes == 2 * 4 * 10 * 16 * 32, (
        "twice: with the exact ones"
    )
    check_limit(large, None)
    with pytest.raises(QuantizeError, match=r"max_seconds allows .*num_samples to \d+ instead of 100"):
        check_limit(large, large.seconds / 2)


def test_many_activations_lie_in_a_file_without_a_name(tmp_path: Path) -> None:
    with HiddenStates((2, 3, 4), 0, tmp_path) as hidden:
        hidden.begin(0)
        for window in range(2):
            hidden.write(window, np.full((3, 4), window, np.float32))
        hidden.end()
        assert hidden.on_disk and hidden.read(0).sum() == 0 and hidden.read(1).sum() == 12
        assert list(tmp_path.iterdir()) == []
    with HiddenStates((2, 3, 4), 1e9, tmp_path) as hidden:
        assert not hidden.on_disk


def test_a_calibrated_recipe_needs_someone_who_runs_the_model(tmp_path: Path) -> None:
    from tiny_checkpoints import tiny_weights, write_safetensors

    source = write_safetensors(tmp_path / "s", tiny_weights())
    with pytest.raises(QuantizeError, match="'t' needs calibration; pass calibration tools"):
        quantize.quantize_checkpoint(source, tmp_path / "out", CALIBRATED)
    assert not (tmp_path / "out").exists()
