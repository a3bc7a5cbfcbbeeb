"""What clients of a real Triton server get: a real OpenVINO engine of a tiny random llama behind it."""

from __future__ import annotations

import concurrent.futures
import json
import queue
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from served_llama import GREEDY, PROMPTS, post

from plansmith_errors import RequestError
from triton_repo import TritonServer, check_repository, generate, stream_generate
from triton_repo.backend.tokenization import PromptTokenizer

pytestmark = pytest.mark.integration

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_a_stream_is_what_the_engine_generates_in_process(
    server: TritonServer, alone: Callable[[str, int], str]
) -> None:
    chunks = list(stream_generate(server.http_url, server.model_name, PROMPTS[0], {**GREEDY, "max_tokens": 200}))
    assert "".join(chunk.text for chunk in chunks) == alone(PROMPTS[0], 200)
    assert sum(chunk.num_output_tokens for chunk in chunks) == 200
    assert [chunk.finish_reason for chunk in chunks if chunk.finish_reason] == ["length"]
    assert all(chunk.text or chunk.finish_reason for chunk in chunks)


def test_without_streaming_the_answer_is_one_message(server: TritonServer, alone: Callable[[str, int], str]) -> None:
    text = alone(PROMPTS[1], 30)
    assert generate(server.http_url, server.model_name, PROMPTS[1], {**GREEDY, "max_tokens": 30}).text == text
    sampling = json.dumps({**GREEDY, "max_tokens": 30})
    status, answer = post(server, "generate", text_input=PROMPTS[1], sampling_parameters=sampling)
    assert (status, answer["text_output"]) == (200, PROMPTS[1] + text)
    status, answer = post(server, "generate", text_input=PROMPTS[1], max_tokens=30, temperature=0, ignore_eos=True)
    assert (status, answer["text_output"]) == (200, PROMPTS[1] + text), "settings may be request parameters"


def test_token_ids_are_a_prompt_too(server: TritonServer, repository: Path, alone: Callable[[str, int], str]) -> None:
    ids = PromptTokenizer(check_repository(repository).tokenizer).encode(PROMPTS[2])
    answer = generate(server.http_url, server.model_name, ids, {**GREEDY, "max_tokens": 20})
    assert answer.text == alone(PROMPTS[2], 20)
    assert answer.num_input_tokens == len(ids)


def test_streams_that_join_and_leave_at_random_get_what_each_gets_alone(
    server: TritonServer, alone: Callable[[str, int], str]
) -> None:
    rng = random.Random(11)
    jobs = [(PROMPTS[n % len(PROMPTS)], rng.randint(1, 300), rng.random() * 0.8) for n in range(32)]

    def run(job: tuple[str, int, float]) -> str:
        prompt, max_tokens, delay = job
        time.sleep(delay)
        sampling = {**GREEDY, "max_tokens": max_tokens}
        return "".join(c.text for c in stream_generate(server.http_url, server.model_name, prompt, sampling))

    with concurrent.futures.ThreadPoolExecutor(len(jobs)) as pool:
        together = list(pool.map(run, jobs))
    for (prompt, max_tokens, _), text in zip(jobs, together, strict=True):
        assert text == alone(prompt, max_tokens)


@pytest.mark.parametrize(
    ("prompt", "sampling", "message"),
    [
        ("", {}, "the prompt is empty"),
        ([], {}, "the prompt is empty"),
        ([5, 100_000], {}, "100000"),
        ([-3], {}, "-3"),
        ("long " * 1900, {}, "at most 2047"),
        ("x" * 2_000_000, {}, r"has 2000000 bytes; 2048 tokens \(max_seq_len\) are at most"),
        ("a", {"max_tokens": 0}, "max_tokens is 0"),
        ("a", {"max_tokens": 1.5}, "max_tokens is 1.5"),
        ("a", {"temperature": -1}, "temperature is -1"),
        ("a", {"top_p": 2}, "top_p is 2"),
        ("a", {"top_k": "many"}, "top_k is 'many'"),
        ("a", {"temprature": 1}, "did you mean 'temperature'"),
        ("a", {"logprobs": 10_000}, "logprobs is 10000"),
    ],
)
def test_a_bad_request_gets_one_clear_line(
    server: TritonServer, prompt: str | list[int], sampling: dict[str, object], message: str
) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        generate(server.http_url, server.model_name, prompt, sampling)
    assert "\n" not in str(caught.value)
    with pytest.raises(RequestError, match=message):
        list(stream_generate(server.http_url, server.model_name, prompt, sampling))
    assert generate(server.http_url, server.model_name, "a", {"max_tokens": 1}).num_output_tokens == 1


def test_errors_carry_a_code_and_the_server_stays_up(server: TritonServer) -> None:
    status, answer = post(server, "generate", text_input="a", sampling_parameters='{"max_tokens": ')
    assert status == 400
    assert str(answer["error"]).startswith("[INVALID_ARGUMENT] sampling_parameters is not valid JSON")
    status, answer = post(server, "generate", text_input="a", bogus=1)
    assert "[INVALID_ARGUMENT] unknown sampling parameter 'bogus'" in str(answer["error"])
    status, answer = post(server, "generate", text_input="a", stream=True, exclude_input_in_output=False)
    assert "[INVALID_ARGUMENT] exclude_input_in_output is false" in str(answer["error"])


def test_text_that_is_no_utf8_is_refused_over_grpc(server: TritonServer) -> None:
    import tritonclient.grpc as triton

    answers: queue.Queue[tuple[object, Exception | None]] = queue.Queue()
    item = triton.InferInput("text_input", [1], "BYTES")
    item.set_data_from_numpy(np.array([b"ab\xff\xfe"], dtype=np.object_))
    with triton.InferenceServerClient(server.grpc_address) as client:
        client.start_stream(callback=lambda result, error: answers.put((result, error)))
        client.async_stream_infer(server.model_name, [item])
        _, error = answers.get(timeout=20)
    assert "[INVALID_ARGUMENT] text_input is not UTF-8: byte 0xff at offset 2" in str(error)


@pytest.mark.parametrize("example", ["client_http.py", "client_grpc.py"])
def test_the_example_clients_work(server: TritonServer, alone: Callable[[str, int], str], example: str) -> None:
    address = ["--url", server.http_url] if "http" in example else ["--address", server.grpc_address]
    command = [sys.executable, str(EXAMPLES / example), PROMPTS[0], *address, "--max-tokens", "8"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.startswith(alone(PROMPTS[0], 8))
    assert done.stdout.endswith("]\n")
    refused = subprocess.run([*command[:2], "", *address], capture_output=True, text=True, timeout=60, check=False)
    assert refused.returncode == 1
    assert "[INVALID_ARGUMENT] the prompt is empty" in refused.stderr
