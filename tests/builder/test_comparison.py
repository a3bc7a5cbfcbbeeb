"""What an engine gives away against another: the figures of the plain formulas, whatever the chunks."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from scripted_engine import TableEngine
from tiny_models import expected_logits, random_ids, save_model
from transformers import AutoModelForCausalLM

import builder
from plansmith_errors import EngineError
from quantize import Recipe, load_weight, open_checkpoint, quantize_checkpoint

OPTIONS = builder.BuildOptions(precision="exact", max_num_tokens=33)


def plain_figures(logits, base, targets):
    """KL(base || ours), top-1 agreement, perplexity; float64, everything at once. All but the last position count."""
    ours, theirs = (torch.from_numpy(x[:, :-1].astype(np.float64)).log_softmax(-1) for x in (logits, base))
    kl = (theirs.exp() * (theirs - ours)).sum(-1)
    chosen = torch.from_numpy(targets[:, 1:])[..., None]
    same = (ours.argmax(-1) == theirs.argmax(-1)).double()
    return float(kl.mean()), float(same.mean()), float((-ours.gather(-1, chosen)).mean().exp())


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A model, its int4 checkpoint, and transformers' model of the values that the latter stores."""
    path = tmp_path_factory.mktemp("models")
    model = save_model(path / "source", "llama")
    recipe = Recipe(name="test", linears={"scheme": "int4", "group_size": 32}, embeddings={"scheme": "int8"})
    quantize_checkpoint(path / "source", path / "int4", recipe)
    stored = open_checkpoint(path / "int4")
    weights = load_file(path / "source" / "model.safetensors")
    (path / "dequantized").mkdir()
    values = {name: torch.from_numpy(np.array(load_weight(stored, name).dequantize())) for name in weights}
    save_file(values, path / "dequantized" / "model.safetensors", metadata={"format": "pt"})
    (path / "dequantized" / "config.json").write_text((path / "source" / "config.json").read_text())
    dequantized = AutoModelForCausalLM.from_pretrained(path / "dequantized", attn_implementation="eager").eval()
    return path, model, dequantized


def test_a_quantized_cpu_engine_against_the_reference_has_the_figures_of_the_plain_formulas(models, tmp_path):
    path, model, dequantized = models
    ids = random_ids(num_seqs=1, num_tokens=230)[0]
    windows = ids[:200].reshape(2, 100)  # the rest is no whole window
    logits, base = expected_logits(dequantized, windows), expected_logits(model, windows)
    kl, top1, perplexity = plain_figures(logits, base, windows)
    builder.build_engine(path / "int4", tmp_path, OPTIONS, plansmith_version="1")
    engine = builder.load_engine(tmp_path, num_blocks=4, num_threads=1)
    done = []
    found = builder.compare_engines(
        engine,
        builder.load_reference(path / "source", num_blocks=4),  # takes 512 tokens a step, the other 33
        ids,
        window=100,
        progress=lambda *state: done.append(state[:2]),
    )
    assert kl > 0.01 and 0 < top1 < 1
    assert found.kl_per_token == pytest.approx(kl, abs=1e-4)
    assert found.top1_agreement == pytest.approx(top1, abs=0.01)
    assert found.perplexity.perplexity == pytest.approx(perplexity, rel=1e-4)
    assert found.baseline_perplexity.num_scored == 2 * 99
    error = np.abs(logits - base)[:, :-1]
    assert found.mean_logit_error == pytest.approx(error.mean(), abs=1e-4)
    assert found.max_logit_error == pytest.approx(error.max(), abs=1e-3)
    assert done == [(1, 2), (2, 2)]


def test_an_engine_gives_nothing_away_against_itself(models):
    path = models[0]
    engines = [builder.load_reference(path / "source", OPTIONS, num_blocks=4) for _ in range(2)]
    ids = random_ids(num_seqs=1, num_tokens=100)[0]
    for pair in (engines, engines[:1] * 2):
        found = builder.compare_engines(*pair, ids, window=50)
        assert (found.kl_per_token, found.mean_logit_error, found.max_logit_error) == (0, 0, 0)
        assert found.top1_agreement == 1
        assert found.perplexity == found.baseline_perplexity == builder.perplexity(engines[0], ids, window=50)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.floats(1e-3, 60), st.floats(-1e3, 1e3), st.integers(2, 130), st.integers(1, 70))
def test_any_logits_match_the_plain_formula(seed, spread, offset, length, chunk):
    rng = np.random.default_rng(seed)
    tables = rng.normal(0, spread, (2, 20, 20)).astype(np.float32)
    tables[1] += np.float32(offset)  # the same distribution, whatever is added to a row
    ids = rng.integers(0, 20, length)
    window = min(length, 128)
    engines = [TableEngine(table, max_num_tokens=chunk, num_blocks=8) for table in tables]
    found = builder.compare_engines(*engines, ids, window=window)
    kl, top1, perplexity = plain_figures(
        tables[0][ids[:window]][None], tables[1][ids[:window]][None], ids[None, :window]
    )
    assert found.kl_per_token == pytest.approx(kl, rel=1e-5, abs=1e-5)
    assert found.top1_agreement == pytest.approx(top1)
    assert found.perplexity.perplexity == pytest.approx(perplexity, rel=1e-5)


def test_what_cannot_be_compared_is_refused():
    engine, other = TableEngine(np.zeros((9, 9))), TableEngine(np.zeros((9, 10)))
    with pytest.raises(EngineError, match="9 tokens in its vocabulary, the one it is held against has 10"):
        builder.compare_engines(engine, other, [1, 2, 3], window=2)
    with pytest.raises(EngineError, match="token id 9; the engine's vocabulary is 0 to 8"):
        builder.compare_engines(engine, engine, [1, 9, 3], window=3)
    with pytest.raises(EngineError, match="window is 129 tokens; this engine takes 2 to 128"):
        builder.compare_engines(engine, engine, [1] * 200, window=129)
    with pytest.raises(EngineError, match="2 tokens or more; found 1"):
        builder.compare_engines(engine, engine, [1], window=2)
    for bad in (np.nan, np.inf):
        broken = TableEngine(np.full((9, 9), bad))
        with pytest.raises(EngineError, match="not finite"):
            builder.compare_engines(broken, engine, [1, 2, 3], window=3)


def test_a_hopeless_engine_has_infinite_perplexity_and_not_a_crash():
    table = np.zeros((4, 4))
    table[:, 0] = 1e4
    assert builder.perplexity(TableEngine(table), [1, 2, 3], window=3).perplexity == np.inf
