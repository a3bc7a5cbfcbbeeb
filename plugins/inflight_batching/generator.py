"""The generator: one thread that steps an engine for as long as there are requests."""

from __future__ import annotations

import collections.abc
import logging
import threading
from collections.abc import Callable
from time import perf_counter

from tokenizers import Tokenizer

from plugins.generation import FinishReason, GenerationRequest, GeneratorStats, OutputSink
from plugins.inflight_batching.detokenizer import IncrementalDetokenizer, TextStream, special_token_ids
from plugins.inflight_batching.inbox import Cancel, Inbox
from plugins.inflight_batching.outputs import OutputBuilder
from plugins.inflight_batching.scheduler import Scheduler
from plugins.inflight_batching.sequence import Sequence, check_request
from plugins.inflight_batching.step import StepEngine
from plugins.inflight_batching.timing import StepTiming
from plugins.sampling.sampler import BatchSampler
from plugins.sampling.uniforms import fresh_seed

logger = logging.getLogger(__name__)


class InflightGenerator:
    """Drives ``engine`` for many requests at once (the ``Generator`` protocol). Requests join and leave at every step.

    ``sink`` is called on the step thread, ``on_failure`` too, once, after the engine has failed: every open request has
    then ended with "error", and ``submit`` raises EngineError. The engine stays the caller's, who closes it after
    ``close``. ``timing`` adds up where the time of the steps goes.
    """

    def __init__(
        self,
        engine: StepEngine,
        tokenizer: Tokenizer,
        eos_token_ids: collections.abc.Sequence[int],
        sink: OutputSink,
        on_failure: Callable[[BaseException], None] | None = None,
    ) -> None:
        self.timing = StepTiming()
        self._engine = engine
        self._limits = engine.limits
        self._tokenizer = tokenizer
        self._special_ids = special_token_ids(tokenizer)
        self._token_lengths: dict[int, int] = {}
        self._sink = sink
        self._on_failure = on_failure
        self._inbox = Inbox()
        self._scheduler = Scheduler(self._limits)
        self._sampler = BatchSampler(self._scheduler.max_seqs)
        self._outputs = OutputBuilder(eos_token_ids)
        self._open: dict[str, Sequence] = {}
        self._num_prompt_tokens = 0
        self._num_output_tokens = 0
        self._thread = threading.Thread(target=self._run, name="plansmith-step", daemon=True)
        self._thread.start()

    def submit(self, request: GenerationRequest) -> None:
        """Queue a request. Raises RequestError when it can never run, EngineError after a failure or ``close``."""
        prompt, max_tokens = check_request(request, self._limits)
        sampling = request.sampling
        seed = fresh_seed() if sampling.seed is None else sampling.seed
        detokenizer = IncrementalDetokenizer(self._tokenizer, self._special_ids, self._token_lengths)
        self._inbox.submit(Sequence(request, prompt, max_tokens, seed, TextStream(detokenizer, sampling.stop)))

    def cancel(self, request_id: str) -> None:
        """Stop a request before the next step; an unknown or ended id is ignored."""
        self._inbox.cancel(request_id)

    def stats(self) -> GeneratorStats:
        """Numbers of this moment, read without stopping the step thread."""
        scheduler = self._scheduler
        return GeneratorStats(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting) + self._inbox.num_submitted,
            num_blocks=scheduler.pool.num_blocks,
            num_free_blocks=scheduler.pool.num_free,
            num_steps=self.timing.num_steps,
            num_prompt_tokens=self._num_prompt_tokens,
            num_output_tokens=self._num_output_tokens,
            num_preemptions=scheduler.num_preemptions,
        )

    def close(self) -> None:
        """Stop the step thread after its present step; open requests end with "cancelled". Safe to call twice."""
        self._inbox.close("the generator is closed: start another one")
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        try:
            while self._read_inbox():
                self._step()
            self._end(list(self._open.values()), "cancelled")
        except BaseException as error:  # whatever ends this thread, its clients must hear of it
            self._fail(error)

    def _read_inbox(self) -> bool:
        """Admit and cancel; False when the generator is to end."""
        messages, is_closed = self._inbox.take(wait=not self._scheduler.has_work)
        cancelled = []
        for message in messages:
            if isinstance(message, Cancel):
                sequence = self._open.get(message.request_id)
                if sequence is not None and sequence not in cancelled:
                    cancelled.append(sequence)
            else:
                self._open[message.request_id] = message
                self._num_prompt_tokens += message.num_prompt_tokens
                self._scheduler.add(message)
        self._end(cancelled, "cancelled")
        return not is_closed

    def _step(self) -> None:
        started = perf_counter()
        plan = self._scheduler.schedule()
        if plan is None:
            return
        for sequence in plan.admitted:
            self._sampler.set_slot(sequence.slot, sequence.sampling, sequence.seed)
        scheduled = perf_counter()
        logits = self._engine.step(plan.inputs)
        stepped = perf_counter()
        sampled = self._sampler.sample(logits, plan.sampled_slots, self._scheduler.positions(plan))
        sampled_at = perf_counter()
        self._scheduler.advance(plan, sampled.token_ids)
        advanced = perf_counter()
        outputs, ended = self._outputs.add_tokens(plan.sampled, sampled)
        self._num_output_tokens += len(plan.sampled)
        self._release(ended)
        if outputs:
            self._sink(outputs)
        self.timing.add(
            schedule=scheduled - started + advanced - sampled_at,
            step=stepped - scheduled,
            sample=sampled_at - stepped,
            output=perf_counter() - advanced,
        )

    def _end(self, sequences: list[Sequence], reason: FinishReason, error: str | None = None) -> None:
        """End these before their time and say so."""
        if sequences:
            self._release(sequences)
            self._sink([self._outputs.last(sequence, reason, error) for sequence in sequences])

    def _release(self, sequences: list[Sequence]) -> None:
        for sequence in sequences:
            self._scheduler.remove(sequence)
            del self._open[sequence.request_id]
        # Before the sink: a client may use the id again as soon as it has seen the last output.
        if sequences:
            self._inbox.forget([sequence.request_id for sequence in sequences])

    def _fail(self, error: BaseException) -> None:
        line = " ".join(str(error).split()) or type(error).__name__
        logger.error("the engine failed: %s", line, exc_info=error)
        self._inbox.close(f"the engine has failed: {line}")
        messages, _ = self._inbox.take(wait=False)
        unread = [message for message in messages if isinstance(message, Sequence)]
        last = [self._outputs.last(sequence, "error", line) for sequence in (*self._open.values(), *unread)]
        self._scheduler = Scheduler(self._limits)  # a step cut short may have left it in any state
        self._open.clear()
        self._inbox.forget([output.request_id for output in last])
        try:
            if last:
                self._sink(last)
        except Exception:
            logger.exception("the sink refused the last outputs of %d requests", len(last))
        if self._on_failure is not None:
            self._on_failure(error)
