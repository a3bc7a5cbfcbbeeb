from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path

import psutil
import pytest
from served_llama import GREEDY, start, write_tiny_llama

import builder
from plugins.generation import GenerationOutput, GenerationRequest, SamplingParams
from plugins.inflight_batching.generator import InflightGenerator
from triton_repo import PackageOptions, TritonServer, check_repository, write_repository
from triton_repo.backend.tokenization import PromptTokenizer


@pytest.fixture(scope="session")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("served")
    for name in ("checkpoint", "engine"):
        (base / name).mkdir()
    write_tiny_llama(base / "checkpoint")
    options = builder.BuildOptions(precision="exact", max_batch_size=8)
    builder.build_engine(base / "checkpoint", base / "engine", options, plansmith_version="0.1.0")
    package = PackageOptions(max_queue_size=64, num_threads=1)
    return write_repository(
        base / "engine", base / "checkpoint", base / "repository", package, plansmith_version=version("plansmith")
    )


@pytest.fixture(scope="session")
def server(repository: Path) -> Iterator[TritonServer]:
    with start(repository) as server:
        pid = server.pid
        yield server
    assert not psutil.pid_exists(pid)


@pytest.fixture(scope="session")
def alone(repository: Path) -> Iterator[Callable[[str, int], str]]:
    """The greedy continuation of a prompt, generated in this process with nothing else in the batch."""
    packaged = check_repository(repository)
    tokenizer = PromptTokenizer(packaged.tokenizer)
    engine = builder.load_engine(packaged.engine, num_threads=1)
    outputs: list[GenerationOutput] = []
    ended = threading.Event()

    def sink(step: list[GenerationOutput]) -> None:
        outputs.extend(step)
        if step[-1].finish_reason is not None:
            ended.set()

    generator = InflightGenerator(engine, tokenizer.tokenizer, tokenizer.eos_token_ids, sink)

    def generate_alone(prompt: str, max_tokens: int) -> str:
        outputs.clear()
        ended.clear()
        sampling = SamplingParams.from_mapping({**GREEDY, "max_tokens": max_tokens})
        generator.submit(GenerationRequest(prompt, tokenizer.encode(prompt), sampling))
        assert ended.wait(60)
        return "".join(output.text for output in outputs)

    yield generate_alone
    generator.close()
    engine.close()
