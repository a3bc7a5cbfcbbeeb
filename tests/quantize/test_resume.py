"""A run that was stopped anywhere goes on where it was, and nobody can tell from the result."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_checkpoints import tiny_weights, write_safetensors

import quantize
from plansmith_errors import QuantizeError
from quantize import journal
from quantize.recipe import Recipe

RECIPE = Recipe.model_validate(
    {
        "name": "mixed",
        "linears": {"scheme": "int4", "group_size": 32, "symmetric": False},
        "embeddings": {"scheme": "fp8"},
        "overrides": [{"match": "*.mlp.*", "scheme": "nvfp4"}],
    }
)
SHARD = 12_000  # bytes: several files
NUM_TENSORS = 20


class StoppedError(Exception):
    pass


def stop_after(count: int) -> Callable[[int, int, str], None]:
    calls = iter(range(1, count))

    def progress(done: int, total: int, name: str) -> None:
        if next(calls, None) is None:
            raise StoppedError

    return progress


def contents(directory: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in directory.iterdir()}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_safetensors(tmp_path / "source", tiny_weights())


@pytest.fixture
def whole(source: Path, tmp_path: Path) -> dict[str, bytes]:
    quantize.quantize_checkpoint(source, tmp_path / "whole", RECIPE, max_shard_bytes=SHARD)
    return contents(tmp_path / "whole")


class Runs:
    """One output that several runs work at."""

    def __init__(self, source: Path, directory: Path) -> None:
        self.source, self.output, self.state = source, directory / "out", directory / "state"
        self.resumed: list[tuple[int, int]] = []

    def run(self, progress: Callable[[int, int, str], None] | None = None, fingerprint: str = "a") -> list[str]:
        """Names of the tensors that this run wrote."""
        written: list[str] = []

        def count(done: int, total: int, name: str) -> None:
            written.append(name)
            if progress is not None:
                progress(done, total, name)

        resume = quantize.Resume(self.state, fingerprint, lambda done, total: self.resumed.append((done, total)))
        quantize.quantize_checkpoint(
            self.source, self.output, RECIPE, progress=count, max_shard_bytes=SHARD, resume=resume
        )
        return written

    def stop(self, count: int) -> None:
        with pytest.raises(StoppedError):
            self.run(stop_after(count))


@pytest.fixture
def runs(source: Path, tmp_path: Path) -> Runs:
    return Runs(source, tmp_path)


@pytest.mark.parametrize("count", range(1, NUM_TENSORS + 1))
def test_what_was_finished_is_not_done_again_and_the_bytes_are_the_same(
    runs: Runs, whole: dict[str, bytes], count: int
) -> None:
    runs.stop(count)
    assert len(runs.run()) == NUM_TENSORS - count
    assert runs.resumed == [(count, NUM_TENSORS)]
    assert contents(runs.output) == whole
    assert sum(name.endswith(".safetensors") for name in whole) > 2


def test_it_may_be_stopped_again_and_again(runs: Runs, whole: dict[str, bytes]) -> None:
    for _ in range(NUM_TENSORS):
        runs.stop(1)
    assert runs.run() == []
    assert contents(runs.output) == whole


def test_what_was_being_written_is_cut_off(runs: Runs, whole: dict[str, bytes]) -> None:
    runs.stop(7)
    shard = max(runs.output.glob("*.safetensors"))
    with shard.open("ab") as file:
        file.write(b"half a tensor" * 9999)
    (runs.output / "config.json").write_text("{")
    with (runs.state / "journal.jsonl").open("a") as file:
        file.write('{"tensor": {"report": {"name": "model.la')
    assert len(runs.run()) == NUM_TENSORS - 7
    assert contents(runs.output) == whole


def test_other_settings_start_anew_and_say_so(
    runs: Runs, whole: dict[str, bytes], caplog: pytest.LogCaptureFixture
) -> None:
    runs.stop(7)
    assert len(runs.run(fingerprint="b")) == NUM_TENSORS
    assert [record.getMessage() for record in caplog.records] == [
        f"{runs.output}: cannot be continued by this run; starting anew"
    ]
    assert contents(runs.output) == whole


@pytest.mark.parametrize("lost", ["a file", "its end", "the journal's first line"])
def test_a_journal_that_says_more_than_there_is_is_not_believed(runs: Runs, whole: dict[str, bytes], lost: str) -> None:
    runs.stop(15)
    shard = max(runs.output.glob("*.safetensors"))
    if lost == "a file":
        shard.unlink()
    elif lost == "its end":
        shard.write_bytes(shard.read_bytes()[:-1])
    else:
        (runs.state / "journal.jsonl").write_bytes(b"\0" * 4096)
    assert len(runs.run()) == NUM_TENSORS
    assert contents(runs.output) == whole


def test_after_a_power_cut_only_what_was_synced_counts(
    runs: Runs, whole: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    runs.stop(15)
    lines = [json.loads(line) for line in (runs.state / "journal.jsonl").read_text().splitlines()]
    num_synced = max(line["synced"] for line in lines if "synced" in line)
    assert 0 < num_synced < 15  # whole files are synced, the last one is not
    monkeypatch.setattr(journal, "boot_id", lambda: "another")
    assert len(runs.run()) == NUM_TENSORS - num_synced
    assert contents(runs.output) == whole


def test_a_disk_that_was_never_synced_counts_for_nothing(
    runs: Runs, whole: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    runs.stop(1)
    monkeypatch.setattr(journal, "boot_id", lambda: "another")
    runs.stop(1)
    assert len(runs.run()) == NUM_TENSORS - 1  # the second run is of this boot
    assert contents(runs.output) == whole


def test_weights_that_cannot_be_quantized_leave_nothing_to_go_on_from(tmp_path: Path) -> None:
    weights = tiny_weights()
    weights["model.layers.1.mlp.down_proj.weight"][3, 3] = float("nan")
    runs = Runs(write_safetensors(tmp_path / "bad", weights), tmp_path)
    with pytest.raises(QuantizeError, match="is not finite"):
        runs.run()
    assert not runs.state.exists()
