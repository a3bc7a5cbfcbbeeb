"""The gate of TensorRT builds: what its schedule does to an engine, what passes, and what a broken network is told."""

from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
from calibrated_llama import TOOLS, save_with_tokenizer, write_text
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file
from tiny_models import make_step, random_ids, save_model
from trt_networks import trt

from builder.network.interpreter.engine import InterpretedEngine
from builder.network_gate import gate
from builder.network_gate.bounds import bounds_of
from builder.network_gate.comparison import compare_logits
from builder.network_gate.networks import interpreted_engine
from builder.network_gate.replay import ScatteredBlocks
from builder.network_gate.schedule import ScheduleLimits, make_schedule, num_blocks_needed
from builder.parallel import Parallelism
from builder.targets.tensorrt.options import NetworkOptions
from plansmith_errors import BuildError, EngineError
from plugins.inflight_batching.step import EngineLimits
from quantize import Recipe, quantize_checkpoint

SMALL = {"max_batch_size": 3, "max_num_tokens": 32, "max_seq_len": 64, "tokens_per_block": 8}
IDS = random_ids(1, 100)[0].tolist()


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    save_model(path, "llama")
    return path


def check(checkpoint, parallelism=None, **options):
    options = NetworkOptions(**({"dtype": "float16"} | SMALL | options))
    return gate.check_network(checkpoint, "tensorrt-rtx", parallelism or Parallelism(), options, IDS)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 6), st.integers(4, 80), st.integers(16, 100), st.sampled_from([4, 8, 16]), st.integers(1, 20))
def test_every_token_is_scheduled_once_and_within_the_limits(batch, tokens, longest, block, window):
    limits = ScheduleLimits(batch, tokens, longest, block, (None, window))
    steps = make_schedule(limits, IDS)
    past = dict.fromkeys(range(5), 0)
    ended = set()
    for step in steps:
        assert 0 < len(step.chunks) <= batch and sum(len(chunk.ids) for chunk in step.chunks) <= tokens
        for chunk in step.chunks:
            assert chunk.sequence not in ended and chunk.past == past[chunk.sequence]
            past[chunk.sequence] += len(chunk.ids)
        ended |= set(step.ended)
    assert ended == set(range(5)) and max(past.values()) <= longest
    assert max(past.values()) > min(window, longest - 13)


def test_the_schedule_mixes_prefill_and_decode_and_takes_over_blocks():
    steps = make_schedule(ScheduleLimits(4, 64, 100, 8), IDS)
    kinds = {(len(chunk.ids) > 1, chunk.past > 0) for step in steps for chunk in step.chunks}
    assert kinds == {(True, False), (True, True), (False, True), (False, False)}
    assert any("prefill" in str(step) and "decoding" in str(step) for step in steps)
    assert any(str(step) == "3 decoding" for step in steps)
    blocks = ScatteredBlocks(num_blocks_needed(steps, 8), 8, seed=1)
    owners: dict[int, set[int]] = {}
    for step in steps:
        tables = [blocks.table(chunk.sequence, chunk.past + len(chunk.ids)) for chunk in step.chunks]
        assert len({block for table in tables for block in table}) == sum(map(len, tables))
        for chunk, table in zip(step.chunks, tables, strict=True):
            for block in table:
                owners.setdefault(block, set()).add(chunk.sequence)
        for sequence in step.ended:
            blocks.free(sequence)
    assert any(len(sequences) > 1 for sequences in owners.values())


def test_an_engine_too_small_for_any_check_is_refused():
    with pytest.raises(BuildError, match="max_seq_len is 8; a check of the network needs 16 or more"):
        make_schedule(ScheduleLimits(1, 8, 8, 8), IDS)


@pytest.mark.parametrize("parallelism", [Parallelism(), Parallelism(tp_size=2, pp_size=2)])
def test_a_right_network_passes(llama, parallelism):
    report = check(llama, parallelism)
    assert report.failed is None and report.culprit is None
    assert sum(step.num_tokens for step in report.steps) > 60
    assert max(step.rms_error for step in report.steps) < 0.5 * report.bounds.rms_error


def test_in_float32_the_network_is_the_reference_to_the_last_digits(llama):
    report = check(llama, dtype="float32")
    assert report.failed is None and max(step.max_error for step in report.steps) < 1e-4


def test_a_wrong_weight_is_found_with_its_step_and_module(llama, tmp_path, monkeypatch):
    tensors = load_file(llama / "model.safetensors")
    tensors["model.layers.1.self_attn.o_proj.weight"] = tensors["model.layers.1.self_attn.o_proj.weight"][::-1].copy()
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text((llama / "config.json").read_text())
    right = gate.interpreted_engine
    monkeypatch.setattr(gate, "interpreted_engine", lambda path, *given, **named: right(tmp_path, *given, **named))
    report = check(llama)
    assert report.failed is not None and report.failed.number == 0
    assert report.culprit is not None and report.culprit.module == "model.layers.1.self_attn.o_proj"


@pytest.mark.parametrize("parallelism", [Parallelism(), Parallelism(tp_size=2)])
@pytest.mark.parametrize(
    "linears",
    [
        {"scheme": "fp8", "activations": "fp8", "activation_scale": "token"},
        {"scheme": "int8", "activations": "int8"},
    ],
)
def test_rounded_inputs_are_near_exact_in_float32(llama, tmp_path, linears, parallelism):
    """Scales of each token, and static ones that are too small, so that many inputs are clamped."""
    recipe = {"name": "test", "linears": linears}
    if "activation_scale" not in linears:
        text = write_text(tmp_path / "text")
        recipe["calibration"] = {"text": text, "num_samples": 2, "sequence_length": 64}
    save_with_tokenizer(tmp_path / "source")
    quantize_checkpoint(tmp_path / "source", tmp_path / "q", Recipe.model_validate(recipe), calibration_tools=TOOLS)
    tensors = safetensors.torch.load_file(tmp_path / "q" / "model.safetensors")
    scales = {name: scale / 4 for name, scale in tensors.items() if name.endswith(".input_scale")}
    safetensors.torch.save_file(tensors | scales, tmp_path / "q" / "model.safetensors", metadata={"format": "pt"})
    report = check(tmp_path / "q", parallelism, dtype="float32")
    assert report.failed is None and report.roundings == (linears["scheme"],)
    assert np.median([step.rms_error for step in report.steps]) < 1e-5


def test_what_a_stale_cache_does_is_found(llama, monkeypatch):
    """As if the blocks of a sequence that ended were still its own: another sequence reads what it left."""
    table = ScatteredBlocks.table

    def wrong(self, sequence, num_tokens):
        blocks = table(self, sequence, num_tokens)
        stale = self._tokens_per_block == SMALL["tokens_per_block"] and len(blocks) > 1
        return blocks[:-1] + blocks[:1] if stale else blocks

    monkeypatch.setattr(ScatteredBlocks, "table", wrong)
    report = check(llama)
    assert report.failed is not None and report.steps[-1].max_error > 1


def test_bounds_grow_with_the_rounding_and_allow_outliers_to_mixtures_alone():
    exact, half, short = (bounds_of(dtype, 4) for dtype in ("float32", "float16", "bfloat16"))
    assert exact.rms_error < half.rms_error / 100 and short.rms_error == 8 * half.rms_error
    assert bounds_of("float16", 4, ["fp8"]).rms_error > half.rms_error
    assert half.outliers(100) == 0 == bounds_of("float32", 4, is_mixture=True).outliers(100)
    assert bounds_of("float16", 4, is_mixture=True).outliers(100) == 50


def test_logits_that_are_no_numbers_are_beyond_every_bound():
    expected = np.random.default_rng(0).standard_normal((3, 20)).astype(np.float32)
    found = expected.copy()
    found[1, 3] = np.nan
    errors = compare_logits(found, expected)
    assert errors.outliers(bounds_of("float16", 2)).tolist() == [False, True, False]


@pytest.fixture(scope="module")
def engine(llama) -> InterpretedEngine:
    options = NetworkOptions(dtype="float32", **SMALL)
    return interpreted_engine(llama, "tensorrt-rtx", Parallelism(), options, num_blocks=8)


def test_a_step_may_want_no_logits_or_some(engine):
    step = make_step([(random_ids()[0][:10], 0)], [np.arange(4)], 8)
    every = engine.step(step).copy()
    for wanted in ([], [9], [2, 5]):
        some = engine.step(_with_logits(step, wanted))
        np.testing.assert_allclose(some, every[wanted], atol=1e-5)


def test_a_step_that_no_plan_would_take_is_refused(engine):
    step = make_step([(random_ids()[0][:33], 0)], [np.arange(5)], 8)
    with pytest.raises(BuildError, match=r"the step's input_ids is \[33\]; the plan takes \[1\] to \[32\]"):
        engine.step(step)


def test_ranks_must_be_complete_and_a_closed_engine_says_so(llama):
    limits = EngineLimits(1, 1, 1, 8, 1, 1)
    with pytest.raises(BuildError, match="0 ranks were built, expected 2"):
        InterpretedEngine(trt, [], Parallelism(tp_size=2), limits)
    options = NetworkOptions(dtype="float32", **SMALL)
    engine = interpreted_engine(llama, "tensorrt-rtx", Parallelism(), options, num_blocks=8)
    engine.close()
    with pytest.raises(EngineError, match="closed"):
        engine.step(make_step([(random_ids()[0][:3], 0)], [np.arange(1)], 8))


def _with_logits(step, wanted):
    from dataclasses import replace

    return replace(step, logits_indices=np.array(wanted, np.int64))
