from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from recording_sink import RecordingSink, open_stream

from triton_repo.backend.pacing import Pacing
from triton_repo.backend.protocol import Delta
from triton_repo.backend.senders import SenderPool


@pytest.fixture
def cancelled() -> list[int]:
    return []


@pytest.fixture
def pool(cancelled: list[int]) -> Iterator[SenderPool]:
    pool = SenderPool(Pacing(min_cancel_interval=0.0, max_cancel_checks_per_second=1e9), cancelled.append)
    yield pool
    pool.close()


def token(request_id: int, number: int, text: str = "x", finish: str | None = None) -> Delta:
    return Delta(request_id, text, 3, number, finish)


def test_text_arrives_whole_in_order_and_with_one_end(pool: SenderPool) -> None:
    sinks = {request_id: RecordingSink(send_s=0.002) for request_id in range(1, 9)}
    streams = {request_id: open_stream(request_id, sink) for request_id, sink in sinks.items()}
    for stream in streams.values():
        pool.open(stream)
    for step in range(1, 101):
        finish = "length" if step == 100 else None
        pool.push([(stream, token(i, step, f"{step},", finish)) for i, stream in streams.items()])
        time.sleep(0.0005)
    for sink in sinks.values():
        last = sink.wait()
        assert sink.text == "".join(f"{step}," for step in range(1, 101))
        assert sum(chunk.num_output_tokens for chunk in sink.chunks) == 100
        assert last.finish_reason == "length"
        assert sum(chunk.is_final for chunk in sink.chunks) == 1
        assert len(sink.threads) == 1, "a stream belongs to one sender, or its end could overtake its text"
    assert len(pool) == 0


def test_tokens_are_sent_together_when_the_server_is_slower_than_the_engine(pool: SenderPool) -> None:
    sink = RecordingSink(send_s=0.02)
    stream = open_stream(1, sink)
    pool.open(stream)
    for step in range(1, 51):
        pool.push([(stream, token(1, step, finish="stop" if step == 50 else None))])
        time.sleep(0.001)
    sink.wait()
    assert sink.text == "x" * 50
    assert len(sink.chunks) < 25


def test_a_delayed_token_is_sent_although_nothing_follows_it(cancelled: list[int]) -> None:
    pool = SenderPool(Pacing(max_messages_per_second=1, max_delay=0.05), cancelled.append)
    sink = RecordingSink()
    stream = open_stream(1, sink)
    pool.open(stream)
    pool.push([(stream, token(1, 1, "first"))])
    while not sink.chunks:
        time.sleep(0.001)
    pool.push([(stream, token(1, 2, " second"))])
    deadline = time.monotonic() + 10
    while sink.text != "first second" and time.monotonic() < deadline:
        time.sleep(0.005)
    assert [chunk.text for chunk in sink.chunks] == ["first", " second"]
    pool.close()


def test_without_streaming_there_is_one_response_with_the_prompt_before_the_text(pool: SenderPool) -> None:
    sink = RecordingSink()
    stream = open_stream(1, sink, is_streaming=False, prefix="Once")
    pool.open(stream)
    for step in range(1, 6):
        pool.push([(stream, token(1, step, " more", "stop" if step == 5 else None))])
    assert sink.wait().text == "Once" + " more" * 5
    assert [chunk.num_output_tokens for chunk in sink.chunks] == [5]


def test_log_probabilities_of_several_tokens_are_one_json_array(pool: SenderPool) -> None:
    sink = RecordingSink()
    stream = open_stream(1, sink, is_streaming=False)
    pool.open(stream)
    pool.push([(stream, Delta(1, "a", 3, 1, None, ['{"token_id":1}']))])
    pool.push([(stream, Delta(1, "b", 3, 2, "length", ['{"token_id":2}']))])
    assert sink.wait().logprobs == '[{"token_id":1},{"token_id":2}]'


def test_a_client_that_is_gone_is_reported_once(pool: SenderPool, cancelled: list[int]) -> None:
    sink = RecordingSink()
    stream = open_stream(7, sink)
    pool.open(stream)
    sink.cancelled = True
    for step in range(1, 20):
        pool.push([(stream, token(7, step))])
        time.sleep(0.005)
    assert cancelled == [7]
    pool.push([(stream, Delta(7, "", 3, 19, "cancelled"))])
    assert sink.wait().error == "[CANCELLED] the request was cancelled"


def test_a_response_that_the_server_refuses_cancels_that_request_only(pool: SenderPool, cancelled: list[int]) -> None:
    class RefusingSink(RecordingSink):
        def send(self, chunk: object) -> None:
            raise RuntimeError("the response sender is closed")

    refused, healthy = open_stream(1, RefusingSink()), open_stream(2, RecordingSink())
    for stream in (refused, healthy):
        pool.open(stream)
    pool.push([(refused, token(1, 1)), (healthy, token(2, 1, finish="stop"))])
    assert isinstance(healthy.sink, RecordingSink)
    assert healthy.sink.wait().finish_reason == "stop"
    deadline = time.monotonic() + 5
    while cancelled != [1] and time.monotonic() < deadline:
        time.sleep(0.005)
    assert cancelled == [1]


def test_idle_senders_take_no_cpu_time(pool: SenderPool) -> None:
    assert len(pool) == 0
    before = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - before < 0.1
