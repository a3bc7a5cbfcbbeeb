"""Perplexity through the step contract, against the same figure computed with transformers."""

import math

import pytest
import torch
from tiny_models import random_ids, save_model

import builder
from plansmith_errors import EngineError


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    return path, save_model(path, "llama")


def nll_of_transformers(model, ids, window):
    total, scored = 0.0, 0
    for start in range(0, len(ids) - window + 1, window):
        part = torch.from_numpy(ids[start : start + window])[None]
        with torch.inference_mode():
            total += float(model(part, labels=part).loss) * (window - 1)
        scored += window - 1
    return total / scored


def test_reference_and_cpu_give_the_figure_of_transformers(model, tmp_path):
    path, hf_model = model
    ids = random_ids(num_seqs=1, num_tokens=230)[0]
    expected = nll_of_transformers(hf_model, ids, 100)
    options = builder.BuildOptions(precision="exact", max_num_tokens=33)  # three chunks and a rest in each window
    builder.build_engine(path, tmp_path, options, plansmith_version="1")
    for engine in (builder.load_reference(path, options, num_blocks=4), builder.load_engine(tmp_path, num_blocks=4)):
        found = builder.perplexity(engine, ids, window=100)
        assert found.nll_per_token == pytest.approx(expected, abs=1e-5)
        assert found.perplexity == pytest.approx(math.exp(expected), rel=1e-4)
        assert found.num_scored == 2 * 99


def test_max_windows_and_short_texts(model):
    engine = builder.load_reference(model[0], num_blocks=4)
    ids = random_ids(num_seqs=1, num_tokens=90)[0]
    assert builder.perplexity(engine, ids, window=20, max_windows=3).num_scored == 3 * 19
    assert builder.perplexity(engine, ids[:5], window=20).num_scored == 4
    assert builder.perplexity(engine, ids[:2].tolist(), window=20).num_scored == 1
    with pytest.raises(EngineError, match="2 tokens or more; found 1"):
        builder.perplexity(engine, ids[:1], window=20)
    with pytest.raises(EngineError, match="window is 129 tokens; this engine takes 2 to 128"):
        builder.perplexity(engine, ids, window=129)
