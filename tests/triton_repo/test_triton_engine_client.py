"""The stub's side and the engine process together: a real process, pipes and scheduler over a scripted engine."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from recording_sink import RecordingSink, open_stream

from plansmith_errors import EngineError
from triton_repo.backend.engine_client import EngineClient
from triton_repo.backend.protocol import Submit

MakeClient = Callable[..., EngineClient]


def submit(
    client: EngineClient, request_id: int, text: str = "a", *, streaming: bool = True, **sampling: object
) -> RecordingSink:
    sink = RecordingSink()
    settings = json.dumps({"temperature": 0, **sampling})
    refusal = client.submit(
        open_stream(request_id, sink, is_streaming=streaming), Submit(request_id, text, None, settings, "")
    )
    assert refusal is None, refusal
    return sink


def engine_pid(client: EngineClient) -> int:
    child = client._child
    assert child is not None
    return child.pid


def wait_until(condition: Callable[[], bool], timeout: float = 20.0) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


def test_a_request_is_answered_and_what_libraries_print_disturbs_nothing(engine_client: MakeClient) -> None:
    client = engine_client("--chatter")
    ready = client.start(30)
    assert (ready.max_batch_size, ready.max_seq_len, ready.vocab_size) == (4, 512, 258)
    last = submit(client, 1, "a", streaming=False, max_tokens=5).wait()
    assert (last.text, last.finish_reason, last.num_input_tokens, last.num_output_tokens) == ("bcdef", "length", 1, 5)


def test_what_is_wrong_with_a_request_is_said_to_its_client_alone(engine_client: MakeClient) -> None:
    client = engine_client()
    client.start(30)
    requests = {
        "{broken": "sampling_parameters is not valid JSON",
        "[1]": "sampling_parameters is a JSON list",
        '{"max_tokens": 0}': "max_tokens is 0",
        '{"max_tokens": 1, "max_tokens": 2}': "a name is given twice",
        '{"temprature": 1}': "did you mean 'temperature'",
        '{"top_p": 7}': "top_p is 7",
    }
    for request_id, (sampling, message) in enumerate(requests.items(), 1):
        sink = RecordingSink()
        assert client.submit(open_stream(request_id, sink), Submit(request_id, "a", None, sampling, "")) is None
        error = sink.wait().error or ""
        assert error.startswith("[INVALID_ARGUMENT] ")
        assert message in error
    assert submit(client, 100, max_tokens=1).wait().text == "b"


def test_a_prompt_that_is_too_long_is_answered_with_both_numbers(engine_client: MakeClient) -> None:
    client = engine_client()
    client.start(30)
    error = submit(client, 1, "a" * 600).wait().error or ""
    assert "600" in error
    assert "512" in error


def test_request_parameters_are_sampling_parameters_too_but_not_twice(engine_client: MakeClient) -> None:
    client = engine_client()
    client.start(30)
    given, twice = RecordingSink(), RecordingSink()
    parameters = '{"max_tokens": 2, "temperature": 0, "triton_enable_empty_final_response": true}'
    client.submit(open_stream(1, given), Submit(1, "a", None, "", parameters))
    client.submit(open_stream(2, twice), Submit(2, "a", None, '{"max_tokens": 3}', parameters))
    given.wait()
    assert given.text == "bc"
    assert "'max_tokens' is given in sampling_parameters and as a request parameter" in (twice.wait().error or "")


def test_log_probabilities_are_json_with_the_tokens_text(engine_client: MakeClient) -> None:
    client = engine_client()
    client.start(30)
    last = submit(client, 1, "a", streaming=False, max_tokens=2, logprobs=1).wait()
    entries = json.loads(last.logprobs or "[]")
    assert [entry["token"] for entry in entries] == ["b", "c"]
    assert len(entries[0]["top_logprobs"]) == 1
    assert entries[0]["logprob"] < 0


def test_a_beginning_of_sequence_token_is_not_doubled(tokenizer_directory: Path) -> None:
    from triton_repo.backend.tokenization import PromptTokenizer

    tokenizer = PromptTokenizer(tokenizer_directory)
    assert tokenizer.encode("<s><s>a")[0] == 256
    assert tokenizer.encode("<s><s>a")[1] != 256
    assert tokenizer.eos_token_ids == (257,)


def test_too_many_requests_are_refused_at_once(engine_client: MakeClient) -> None:
    client = engine_client("--step-ms", "50", max_queue_size=2)
    client.start(30)
    sinks = [submit(client, request_id, max_tokens=200) for request_id in range(1, 7)]
    refusal = client.submit(open_stream(7, RecordingSink()), Submit(7, "a", None, "", ""))
    assert refusal == "[UNAVAILABLE] 6 requests are open; 4 can run and 2 wait (max_queue_size); retry later"
    for request_id in range(1, 7):
        client.cancel(request_id)
    assert {sink.wait().error for sink in sinks} == {"[CANCELLED] the request was cancelled"}
    assert submit(client, 8, max_tokens=1).wait().finish_reason == "length"


def test_a_killed_engine_ends_its_streams_and_comes_back(engine_client: MakeClient) -> None:
    client = engine_client("--step-ms", "20")
    client.start(30)
    pid = engine_pid(client)
    sinks = [submit(client, request_id, max_tokens=400) for request_id in range(1, 5)]
    wait_until(lambda: all(sink.chunks for sink in sinks))
    os.kill(pid, signal.SIGKILL)
    for sink in sinks:
        assert sink.wait().error == f"[UNAVAILABLE] the engine process {pid} was killed by SIGKILL"
    late = submit(client, 10, max_tokens=3)  # it comes while no engine is there, and waits for the next one
    assert late.wait().finish_reason == "length"
    assert late.text == "bcd"
    assert client.num_restarts == 1
    assert engine_pid(client) != pid


def test_a_failing_engine_says_why_and_is_replaced(engine_client: MakeClient) -> None:
    client = engine_client("--fail-at-step", "3")
    client.start(30)
    error = submit(client, 1, max_tokens=50).wait().error
    assert error == "[INTERNAL] the script says to fail here"
    wait_until(lambda: client.num_restarts == 1)
    assert submit(client, 2, max_tokens=2).wait().finish_reason == "length"


def test_an_engine_that_cannot_load_is_said_at_start(engine_client: MakeClient) -> None:
    client = engine_client("--refuse-to-load")
    with pytest.raises(EngineError, match="built for another machine; build it again"):
        client.start(30)


def test_a_process_that_cannot_even_run_is_said_at_start() -> None:
    client = EngineClient(["/nonexistent/python"], max_queue_size=1)
    with pytest.raises(EngineError, match="cannot be started"):
        client.start(30)


def test_requests_are_refused_while_the_engine_does_not_come_back(engine_client: MakeClient, tmp_path: Path) -> None:
    client = engine_client("--refuse-second-load", str(tmp_path / "loaded"))
    client.start(30)
    os.kill(engine_pid(client), signal.SIGKILL)
    wait_until(lambda: client._state == "failed")
    refusal = client.submit(open_stream(1, RecordingSink()), Submit(1, "a", None, "", ""))
    assert refusal == "[UNAVAILABLE] the engine is not running: loaded once already"


def test_blocks_are_free_again_after_cancels(engine_client: MakeClient) -> None:
    client = engine_client()
    client.start(30)
    sinks = [submit(client, request_id, "a" * 40, max_tokens=300) for request_id in range(1, 9)]
    for request_id in range(1, 9, 2):
        client.cancel(request_id)
    for sink in sinks:
        sink.wait()

    def is_full() -> bool:
        client.query_stats()
        stats = client.stats
        return stats is not None and stats.num_free_blocks == stats.num_blocks == 128 and stats.num_running == 0

    wait_until(is_full)


def test_closing_ends_the_engine_process_and_its_streams(engine_client: MakeClient) -> None:
    client = engine_client("--step-ms", "20")
    client.start(30)
    pid = engine_pid(client)
    sink = submit(client, 1, max_tokens=400)
    client.close()
    assert sink.wait().error is not None
    assert not psutil.pid_exists(pid)


def test_an_engine_process_does_not_outlive_its_parent(engine_client: MakeClient) -> None:
    client = engine_client()
    client.start(30)
    process = psutil.Process(engine_pid(client))
    child = client._child
    assert child is not None
    child._writer.close()  # what the kernel does when the parent dies
    process.wait(10)
