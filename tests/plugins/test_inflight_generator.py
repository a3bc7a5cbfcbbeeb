"""What a client of the generator relies on, with an engine that notices every wrong block."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from step_engines import ConstantEngine, HashEngine, hashed_logits

from plansmith_errors import EngineError, RequestError
from plugins.generation import GenerationRequest, SamplingParams
from plugins.inflight_batching.generator import InflightGenerator
from plugins.inflight_batching.offline import OutputCollector, generate
from plugins.inflight_batching.step import EngineLimits

EOS = 256
TIMEOUT = 60  # seconds; only a generator that hangs gets there
TIGHT = EngineLimits(
    max_batch_size=8, max_num_tokens=24, max_seq_len=96, tokens_per_block=4, num_blocks=40, vocab_size=257
)


class Service:
    """A generator with a collector for its outputs; ``at_step`` runs on the step thread before each step."""

    def __init__(self, engine, tokenizer, sink=None, at_step=None) -> None:
        self.collector = OutputCollector()
        self.outputs = []
        self.failures = []
        self._sink = sink
        if at_step is not None:
            plain_step = engine.step
            engine.step = lambda inputs: (at_step(), plain_step(inputs))[1]
        self.generator = InflightGenerator(engine, tokenizer, [EOS], self._take, self.failures.append)

    def _take(self, outputs) -> None:
        self.outputs.extend(outputs)
        if self._sink is not None:
            self._sink(outputs)
        self.collector(outputs)

    def submit(self, name, prompt_ids, **sampling) -> None:
        self.generator.submit(GenerationRequest(name, prompt_ids, SamplingParams(**sampling)))

    def wait(self, *names):
        return self.collector.wait(names, TIMEOUT)


@pytest.fixture
def serve(byte_tokenizer):
    services = []

    def start(engine, **hooks) -> Service:
        services.append(Service(engine, byte_tokenizer, **hooks))
        return services[-1]

    yield start
    for service in services:
        service.generator.close()


def byte_of(tokenizer, character: str) -> int:
    return tokenizer.encode(character, add_special_tokens=False).ids[0]


def constant_engine(tokenizer, character: str) -> ConstantEngine:
    logits = np.zeros(257, dtype=np.float32)
    logits[byte_of(tokenizer, character)] = 9
    return ConstantEngine(TIGHT, logits)


def random_requests(count: int, rng: np.random.Generator) -> list[tuple[list[int], SamplingParams]]:
    kinds = [
        {"temperature": 0.0},
        {"temperature": 0.7, "seed": 5},
        {"seed": 5, "top_p": 0.9, "logprobs": 2},
        {"top_k": 30, "seed": 9},
    ]
    return [
        (
            rng.integers(0, 256, size=rng.integers(1, 60)).tolist(),
            SamplingParams(max_tokens=int(rng.integers(12, 36)), ignore_eos=bool(number % 2), **kinds[number % 4]),
        )
        for number in range(count)
    ]


def test_requests_that_join_at_random_steps_get_what_each_gets_alone(serve, byte_tokenizer):
    rng = np.random.default_rng(0)
    requests = random_requests(32, rng)
    due = [0, *np.sort(rng.integers(1, 12, size=31)).tolist()]
    engine = HashEngine(TIGHT)
    waiting = list(enumerate(requests))[1:]

    def join() -> None:
        while waiting and due[waiting[0][0]] <= engine.num_steps:
            number, (prompt_ids, sampling) = waiting.pop(0)
            service.generator.submit(GenerationRequest(str(number), prompt_ids, sampling))

    service = serve(engine, at_step=join)
    service.generator.submit(GenerationRequest("0", *requests[0]))
    together = service.wait(*map(str, range(32)))
    stats = service.generator.stats()
    assert stats.num_preemptions > 0
    assert stats.num_free_blocks == stats.num_blocks
    assert stats.num_output_tokens == sum(output.num_output_tokens for output in together)
    assert engine.largest_step == TIGHT.max_num_tokens
    for output, (prompt_ids, sampling) in zip(together, requests, strict=True):
        alone = generate(HashEngine(TIGHT), byte_tokenizer, [EOS], [prompt_ids], sampling)[0]
        assert output.token_ids == alone.token_ids
        assert output.text == alone.text == byte_tokenizer.decode(output.token_ids)
        assert output.finish_reason == alone.finish_reason
        assert output.logprobs == alone.logprobs


def test_greedy_tokens_are_those_of_a_plain_loop(byte_tokenizer):
    history = [3, 1, 4]
    output = generate(HashEngine(TIGHT), byte_tokenizer, [], [history], SamplingParams(temperature=0, max_tokens=20))[0]
    for _ in range(20):
        history.append(int(hashed_logits(np.array(history), 257).argmax()))
    assert list(output.token_ids) == history[3:]
    assert (output.num_prompt_tokens, output.num_output_tokens, output.finish_reason) == (3, 20, "length")


def test_the_pool_is_full_after_500_requests_with_random_cancels(serve):
    rng = np.random.default_rng(1)
    engine = HashEngine(TIGHT)
    service = serve(engine, at_step=lambda: service.generator.cancel(str(rng.integers(0, 1500))))
    names = [str(number) for number in range(500)]

    def submit(part: list[str], seed: int) -> None:
        own = np.random.default_rng(seed)
        for name in part:
            service.submit(name, own.integers(0, 256, size=own.integers(1, 50)), max_tokens=int(own.integers(1, 30)))

    threads = [threading.Thread(target=submit, args=(names[start::4], start)) for start in range(4)]
    for thread in threads:
        thread.start()
    outputs = service.wait(*names)
    for thread in threads:
        thread.join()
    stats = service.generator.stats()
    assert (stats.num_free_blocks, stats.num_running, stats.num_waiting) == (stats.num_blocks, 0, 0)
    reasons = [output.finish_reason for output in outputs]
    assert reasons.count("cancelled") > 20
    assert reasons.count("length") + reasons.count("stop") > 200
    assert sum(output.finish_reason is not None for output in service.outputs) == 500


def test_an_eos_token_stops_and_is_not_shown(serve, byte_tokenizer):
    def output_with(**sampling):
        logits = np.zeros(257, dtype=np.float32)
        logits[EOS] = 9
        return generate(
            ConstantEngine(TIGHT, logits), byte_tokenizer, [EOS], [[1]], SamplingParams(temperature=0, **sampling)
        )[0]

    stopped = output_with(max_tokens=5)
    assert (stopped.text, stopped.token_ids, stopped.finish_reason) == ("", (EOS,), "stop")
    ignored = output_with(max_tokens=5, ignore_eos=True)
    assert (ignored.text, ignored.token_ids, ignored.finish_reason) == ("", (EOS,) * 5, "length")


def test_a_stop_string_ends_the_text_before_it(serve, byte_tokenizer):
    service = serve(constant_engine(byte_tokenizer, "x"))
    service.submit("stops", [1], temperature=0, max_tokens=50, stop=("xxxx",))
    service.submit("held", [1], temperature=0, max_tokens=3, stop=("xxxx",))
    stops, held = service.wait("stops", "held")
    assert (stops.text, stops.num_output_tokens, stops.finish_reason) == ("", 4, "stop")
    assert (held.text, held.num_output_tokens, held.finish_reason) == ("xxx", 3, "length")
    assert len(service.outputs) == 2, "tokens whose text is held back wait for it"


def test_text_arrives_step_by_step(serve, byte_tokenizer):
    service = serve(constant_engine(byte_tokenizer, "x"))
    service.submit("a", [1], temperature=0, max_tokens=4, logprobs=1)
    service.wait("a")
    assert [output.text for output in service.outputs] == ["x"] * 4
    assert [output.num_output_tokens for output in service.outputs] == [1, 2, 3, 4]
    assert all(len(output.token_ids) == len(output.logprobs) == 1 for output in service.outputs)


def test_cancel_ends_running_and_waiting_requests_and_ignores_others(serve, byte_tokenizer):
    started = threading.Event()
    service = serve(constant_engine(byte_tokenizer, "x"), sink=lambda _: started.set())
    for number in range(12):  # eight run, four wait
        service.submit(str(number), [1], temperature=0, max_tokens=90)
    assert started.wait(TIMEOUT)
    service.generator.cancel("nobody")
    for number in (11, 0, 0):
        service.generator.cancel(str(number))
    outputs = service.wait(*map(str, range(12)))
    assert {output.finish_reason for output in outputs} <= {"cancelled", "length"}
    assert outputs[11].finish_reason == "cancelled"
    assert sum(output.finish_reason is not None for output in service.outputs) == 12


def test_an_id_can_be_used_again_once_its_request_has_ended_and_not_before(serve, byte_tokenizer):
    refusals = []

    def again(outputs) -> None:
        try:
            service.submit("a", [1], max_tokens=1)
        except RequestError as refusal:
            refusals.append(str(refusal))

    service = serve(constant_engine(byte_tokenizer, "x"), sink=again)
    service.submit("a", [1], temperature=0, max_tokens=2)
    service.wait("a")
    assert refusals == ["request id 'a' is in use: expected one that is not"]


def test_when_the_engine_fails_every_open_request_hears_of_it_and_new_ones_are_refused(serve):
    all_submitted = threading.Event()
    service = serve(HashEngine(TIGHT, fails_at_step=9, starts=all_submitted))
    for number in range(20):
        service.submit(str(number), [number], max_tokens=60, ignore_eos=True)
    all_submitted.set()
    outputs = service.wait(*map(str, range(20)))
    assert {output.finish_reason for output in outputs} == {"error"}
    assert {output.error for output in outputs} == {"the device is gone: out of memory"}
    service.generator.close()
    assert [type(failure) for failure in service.failures] == [EngineError]
    with pytest.raises(EngineError, match="the engine has failed: the device is gone: out of memory"):
        service.submit("late", [1])


def test_logits_that_are_not_finite_end_their_request_alone(serve, byte_tokenizer):
    engine = constant_engine(byte_tokenizer, "x")
    engine._logits[0] = np.nan
    service = serve(engine)
    service.submit("a", [1], temperature=0, max_tokens=3)
    assert service.wait("a")[0].finish_reason == "error"
    assert "not finite" in service.wait("a")[0].error
    assert service.failures == []
    assert service.generator.stats().num_free_blocks == TIGHT.num_blocks


def test_close_ends_open_requests_and_may_be_called_twice_and_by_the_sink(serve, byte_tokenizer):
    service = serve(constant_engine(byte_tokenizer, "x"), sink=lambda _: service.generator.close())
    service.submit("a", [1], temperature=0, max_tokens=90)
    assert service.wait("a")[0].finish_reason == "cancelled"
    service.generator.close()
    service.generator.close()
    with pytest.raises(EngineError, match="closed"):
        service.submit("b", [1])
    service.generator.cancel("a")


def test_a_refused_request_leaves_no_trace(serve):
    service = serve(HashEngine(TIGHT))
    with pytest.raises(RequestError, match="empty"):
        service.submit("a", [])
    service.submit("a", [1], max_tokens=1)
    assert service.wait("a")[0].num_output_tokens == 1


def test_timing_adds_up_the_parts_of_all_steps(serve):
    service = serve(HashEngine(TIGHT))
    service.submit("a", [1], max_tokens=5, ignore_eos=True)
    service.wait("a")
    service.generator.close()
    timing = service.generator.timing
    assert timing.num_steps == 5
    assert min(timing.step_seconds, timing.schedule_seconds, timing.sample_seconds, timing.output_seconds) > 0
    assert timing.host_seconds == timing.schedule_seconds + timing.sample_seconds + timing.output_seconds
