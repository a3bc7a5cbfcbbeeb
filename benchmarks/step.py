"""What our Python costs in a step: scheduling, block tables, sampling, detokenizing.

usage: python benchmarks/step.py SmolLM2-135M-Instruct.Q4_1.gguf [--rounds N] [--quick]

The real engine of SmolLM2-135M at 1, 4 and 16 sequences, while all of them decode: the share is all the time of a step
that is not spent inside the engine, also what no counter names. Then 256 sequences over an engine that computes
nothing: milliseconds per step with all 49152 logits, and with 1024, whose argmax costs next to nothing. Medians of the
rounds.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import random
import threading
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from time import perf_counter

import numpy as np
import numpy.typing as npt
from models import prepare
from tokenizers import Tokenizer

import builder
from plansmith.console import table
from plugins.generation import GenerationOutput, GenerationRequest, SamplingParams
from plugins.inflight_batching.generator import InflightGenerator
from plugins.inflight_batching.step import EngineLimits, StepEngine, StepInputs
from plugins.inflight_batching.timing import StepTiming

SMALL_VOCABULARY = 1024


class NullEngine:
    """Computes nothing. Its logits are random rows, other ones in every step, so that texts grow as real ones do."""

    def __init__(self, num_seqs: int, vocab_size: int) -> None:
        self._limits = EngineLimits(
            max_batch_size=num_seqs,
            max_num_tokens=8192,
            max_seq_len=2048,
            tokens_per_block=32,
            num_blocks=num_seqs * 64,
            vocab_size=vocab_size,
        )
        self._logits = np.random.default_rng(0).standard_normal((num_seqs + 64, vocab_size), np.float32)
        self._num_steps = 0

    @property
    def limits(self) -> EngineLimits:
        return self._limits

    def step(self, inputs: StepInputs) -> npt.NDArray[np.float32]:
        self._num_steps += 1
        first = self._num_steps % 64
        return self._logits[first : first + len(inputs.logits_indices)]

    def close(self) -> None:
        return


class ObservedEngine:
    """Passes steps on to ``engine`` and notes when those begin in which all ``num_seqs`` sequences decode.

    The generator's counters, ``timing``, are whole at that moment: the last step has ended.
    """

    def __init__(self, engine: StepEngine, num_seqs: int) -> None:
        self.limits = engine.limits
        self.timing = StepTiming()  # the generator's own, set once there is one
        self._engine = engine
        self._num_seqs = num_seqs
        self._marks: list[tuple[float, StepTiming]] = []

    def step(self, inputs: StepInputs) -> npt.NDArray[np.float32]:
        if len(inputs.input_ids) == len(inputs.past_lens) == self._num_seqs:
            self._marks.append((perf_counter(), dataclasses.replace(self.timing)))
        return self._engine.step(inputs)

    def close(self) -> None:
        return

    def milliseconds(self) -> dict[str, float]:
        """Means over the steps that were noted; "other" is what lies between the counters."""
        (began, before), (ended, after) = self._marks[0], self._marks[-1]
        parts = {
            "engine": after.step_seconds - before.step_seconds,
            "schedule": after.schedule_seconds - before.schedule_seconds,
            "sample": after.sample_seconds - before.sample_seconds,
            "output": after.output_seconds - before.output_seconds,
        }
        parts["other"] = ended - began - sum(parts.values())
        parts["step"] = ended - began
        return {name: 1000 * seconds / (len(self._marks) - 1) for name, seconds in parts.items()}


def measure(engine: StepEngine, tokenizer: Tokenizer, num_seqs: int, max_tokens: int, seed: int) -> dict[str, float]:
    """Milliseconds per decode step of ``num_seqs`` greedy sequences, by part.

    Prompts differ in length, so that sequences enter new blocks at different steps, as they do in a service.
    """
    rng = random.Random(seed)
    ends, all_ended = itertools.count(1), threading.Event()

    def sink(outputs: list[GenerationOutput]) -> None:
        for output in outputs:
            if output.finish_reason is not None and next(ends) == num_seqs:
                all_ended.set()

    observed = ObservedEngine(engine, num_seqs)
    generator = InflightGenerator(observed, tokenizer, (), sink)
    observed.timing = generator.timing
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    for number in range(num_seqs):
        prompt = [rng.randrange(100, engine.limits.vocab_size - 100) for _ in range(rng.randint(33, 64))]
        generator.submit(GenerationRequest(str(number), prompt, sampling))
    all_ended.wait()
    generator.close()
    return observed.milliseconds()


def medians(measured: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: median(one[name] for one in measured) for name in measured[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gguf", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="one short round: does it run at all?")
    arguments = parser.parse_args()
    num_rounds, max_tokens = (1, 32) if arguments.quick else (arguments.rounds, 128)
    (model,) = prepare(arguments.gguf)
    tokenizer = Tokenizer.from_file(str(model.checkpoint / "tokenizer.json"))

    engine = builder.load_engine(model.engine)
    measure(engine, tokenizer, 16, 8, seed=0)  # the first steps of an engine are slow
    rows = []
    for num_seqs in (1, 4, 16):
        one = medians([measure(engine, tokenizer, num_seqs, max_tokens, seed) for seed in range(num_rounds)])
        rows.append([num_seqs, *(f"{value:.3f}" for value in one.values()), f"{1 - one['engine'] / one['step']:.1%}"])
    engine.close()
    print(f"{model.name}, CPU engine, ms per decode step")
    print(table(["sequences", *one, "not in the engine"], rows), end="\n\n")

    rows = []
    for vocab_size in (tokenizer.get_vocab_size(), SMALL_VOCABULARY):
        null = NullEngine(256, vocab_size)
        one = medians([measure(null, tokenizer, 256, max_tokens, seed) for seed in range(num_rounds)])
        rows.append([f"{vocab_size} logits each", *(f"{value:.3f}" for value in one.values())])
    print("256 sequences over an engine that computes nothing, ms per decode step")
    print(table(["", *one], rows))


if __name__ == "__main__":
    main()
