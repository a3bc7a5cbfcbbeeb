"""SmolLM2-135M-Instruct in INT4 through the real Triton, in the precision whose results do not depend on the batch."""

from __future__ import annotations

import concurrent.futures
import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from demo_model import ROOT, demo_model
from served_llama import metrics, start, wait_until

import builder
import quantize
from plansmith.version import __version__
from triton_repo import PackageOptions, TritonServer, check_repository, generate, render_chat_with, stream_generate
from triton_repo import write_repository as package

pytestmark = pytest.mark.integration

QUESTIONS = (
    "What is the capital of France?",
    "Name three colours.",
    "Why is the sky blue?",
    "Write a short poem about the sea.",
    "How many days are in a week?",
    "Tell me a story about a fox and a crow, please, and make it a long one with a lesson at its end.",
    "What do bees make?",
    "Explain gravity to a child.",
)


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("demo")
    recipe = quantize.load_recipe(str(ROOT / "examples" / "demo" / "recipe.yaml"))
    quantize.quantize_checkpoint(demo_model(), base / "quantized", recipe)
    (base / "engine").mkdir()
    options = builder.BuildOptions(precision="exact", max_batch_size=32, max_num_tokens=256, max_seq_len=512)
    builder.build_engine(base / "quantized", base / "engine", options, plansmith_version=__version__)
    options = PackageOptions(kv_cache_tokens=4096)
    return package(base / "engine", base / "quantized", base / "repository", options, plansmith_version=__version__)


@pytest.fixture(scope="module")
def server(repository: Path) -> Iterator[TritonServer]:
    with start(repository) as server:
        yield server


def chat_prompt(repository: Path, question: str) -> str:
    return render_chat_with(check_repository(repository).tokenizer, [{"role": "user", "content": question}])


def test_the_model_answers_in_english(server: TritonServer, repository: Path) -> None:
    prompt = chat_prompt(repository, "What is the capital of France?")
    answer = generate(server.http_url, server.model_name, prompt, {"max_tokens": 60, "temperature": 0})
    assert "Paris" in answer.text


def test_32_streams_that_start_at_random_times_get_what_each_gets_alone(server: TritonServer, repository: Path) -> None:
    rng = random.Random(11)
    jobs = [(chat_prompt(repository, QUESTIONS[i % 8]), rng.randint(4, 64)) for i in range(32)]

    def stream(job: tuple[str, int], delay: float = 0.0) -> tuple[str, int]:
        time.sleep(delay)
        sampling = {"max_tokens": job[1], "temperature": 0, "ignore_eos": True}
        chunks = list(stream_generate(server.http_url, server.model_name, job[0], sampling))
        assert chunks[-1].finish_reason == "length"
        return "".join(chunk.text for chunk in chunks), sum(chunk.num_output_tokens for chunk in chunks)

    with concurrent.futures.ThreadPoolExecutor(32) as pool:
        together = list(pool.map(stream, jobs, [rng.uniform(0, 2) for _ in jobs]))
    assert together == [stream(job) for job in jobs]
    assert [num_tokens for _, num_tokens in together] == [num_tokens for _, num_tokens in jobs]


def test_the_block_pool_is_full_after_500_random_requests_and_cancels(server: TritonServer, repository: Path) -> None:
    rng = random.Random(23)

    def request(number: int) -> bool:
        sampling = {"max_tokens": rng.randint(1, 24), "temperature": rng.choice([0, 0.8]), "top_p": 0.9}
        leave_after = rng.choice([0, 1, 2, 10**6, 10**6])
        stream = stream_generate(server.http_url, server.model_name, QUESTIONS[number % 8], sampling)
        for count, _ in enumerate(stream):
            if count >= leave_after:
                stream.close()  # type: ignore[attr-defined]
                return False
        return True

    with concurrent.futures.ThreadPoolExecutor(24) as pool:
        whole = list(pool.map(request, range(500)))
    assert any(whole) and not all(whole)

    def is_full() -> bool:
        now = metrics(server)
        running = now["plansmith_requests_running"] + now["plansmith_requests_waiting"]
        return running == 0 and now["plansmith_kv_blocks_free"] == now["plansmith_kv_blocks"] == 128

    wait_until(is_full)
