"""The benchmark beside other quantizers: it reads their files right, and its table says what it should."""

import importlib
import os
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantize import Recipe

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def load(name):
    """A module of benchmarks/peers, which is no installed package."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        return importlib.import_module(f"peers.{name}")
    finally:
        sys.path.remove(str(BENCHMARKS))


comparison, formats = load("comparison"), load("peer_formats")
process, tables = load("measured_process"), load("peer_tables")


def random_int4(seed, shape):
    return np.random.default_rng(seed).integers(-8, 8, shape).tolist()


@given(st.integers(0, 1000), st.integers(1, 5), st.integers(1, 4))
def test_eight_values_in_a_word_come_back_in_order(seed, rows, words):
    values = random_int4(seed, (rows, 8 * words))
    packed = [
        [sum((row[8 * word + place] + 8) * 16**place for place in range(8)) for word in range(words)] for row in values
    ]
    assert formats.unpack_int32(np.array(packed, np.uint32).view(np.int32)).tolist() == values


@given(st.integers(0, 1000), st.integers(1, 4), st.integers(1, 9))
def test_two_rows_in_a_byte_come_back_in_order(seed, pairs, columns):
    values = random_int4(seed, (2 * pairs, columns))
    packed = [
        [values[2 * pair][column] % 16 + values[2 * pair + 1][column] % 16 * 16 for column in range(columns)]
        for pair in range(pairs)
    ]
    assert formats.unpack_row_pairs(np.array(packed, np.uint8)).tolist() == values


def test_a_peers_weight_is_what_its_run_time_multiplies_with():
    stored = {
        "a.weight": np.array([[0xF1, 0x7F]], np.uint8),
        "a.weight_scale": np.array([[2.0, 4.0], [0.5, 1.0]], np.float32),
        "a.pre_quant_scale": np.array([1.0, 3.0], np.float32),
        "norm.weight": np.ones(2, np.float16),
    }
    decoded = dict(formats.decode_tensors(stored))
    assert decoded["a.weight"].tolist() == [[2.0, -12.0], [-0.5, 21.0]]
    assert decoded["norm.weight"].dtype == np.float32 and set(decoded) == {"a.weight", "norm.weight"}


def test_a_form_that_is_not_decoded_is_refused_by_name():
    with pytest.raises(ValueError, match=r"a\.weight_g_idx"):
        dict(formats.decode_tensors({"a.weight_g_idx": np.zeros(4, np.int32)}))


def test_every_recipe_is_one_that_plansmith_knows():
    jobs = [row.job for row in comparison.ROWS if row.tool == "plansmith"]
    recipes = [Recipe.model_validate(comparison.recipe_of(job, comparison.MODELS["mid"], Path("t"))) for job in jobs]
    assert [recipe.is_calibrated for recipe in recipes] == [job.split("-")[0] in ("awq", "gptq") for job in jobs]


def cost(wall, cpu, startup):
    return process.Cost(wall, cpu, startup, 10**9, 10**9)


def test_ratios_are_to_the_fastest_peer_of_the_same_scheme():
    rows = [row for row in comparison.ROWS if row.scheme == "fp8"]
    results = tables.Results()
    results.add("plansmith-fp8", cost(4.0, 3.0, 1.0))
    results.add("plansmith-fp8", cost(5.0, 2.0, 1.0))  # a second round: the best of each figure
    results.add_copy("plansmith-fp8", cost(3.0, 1.0, None))
    results.add("llmcompressor-fp8", cost(10.0, 20.0, 5.0))
    results.add("modelopt-fp8", cost(8.0, 30.0, 5.0))
    results.reasons["llmcompressor-free-fp8"] = "> 60 s"
    (line,) = tables.ratio_lines(rows, results)
    assert "the fastest peer's CPU seconds 0.10" in line and "wall time 0.50" in line
    assert "without start-up 0.07" in line and "75% of the speed" in line
    table = tables.uncalibrated_table(rows, results, 10**9).splitlines()
    assert "> 60 s" in next(text for text in table if "model_free_ptq" in text)


def test_perplexity_is_set_against_the_better_peers():
    rows = [row for row in comparison.ROWS if row.scheme == "gptq"]
    results = tables.Results(perplexities={"plansmith-gptq": 33.0, "llmcompressor-gptq": 30.0})
    for key in ("plansmith-gptq", "llmcompressor-gptq"):
        results.add(key, cost(1.0, 1.0, 0.5))
    (line,) = tables.ratio_lines(rows, results)
    assert "perplexity +10.0% to the better" in line


def run(tmp_path, code, limit=60.0):
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "weights").write_bytes(bytes(10**6))
    paths = tmp_path / "source", tmp_path / "output", tmp_path / "log"
    return process.run_measured([sys.executable, "-S", "-c", code], *paths, dict(os.environ), limit)


def test_a_process_is_measured_with_what_it_wrote(tmp_path):
    code = f"print('started after 0.25 CPU seconds'); import os; os.mkdir({str(tmp_path / 'output')!r})"
    code += f"; open({str(tmp_path / 'output' / 'x')!r}, 'wb').write(bytes(50)); block = b'1' * 200_000_000"
    measured = run(tmp_path, code)
    assert measured.written == 50 and measured.startup == 0.25
    assert measured.cpu > 0 and measured.peak_bytes > 200_000_000


def test_a_process_that_takes_too_long_is_ended(tmp_path):
    with pytest.raises(process.RowError, match=r"^> 0 s$"):
        run(tmp_path, "import time; time.sleep(60)", limit=0.1)


def test_a_process_that_fails_names_its_log(tmp_path):
    with pytest.raises(process.RowError, match="failed: logs/log"):
        run(tmp_path, "raise SystemExit(1)")
