"""Our scheduler over our CPU engine beside OpenVINO GenAI and a llama.cpp server, in one run.

usage: python benchmarks/cpu_engine.py SmolLM2-135M-Instruct.Q4_1.gguf [--rounds N] [--quick]

Two models: SmolLM2-135M (the file as it is shipped for llama.cpp, Q4_1; the others int4 in groups of 64 with zero
points) and a random Llama of the shape of 1B models (Q4_0 in groups of 32; int4 in groups of 128 with zero points).
Embeddings and heads have 8 bits everywhere. GenAI runs the very constants that our engine runs. Each contender has a
process of its own and all cores, they take turns round by round, and those that wait are stopped.

Decoding is counted while all B sequences decode, after prompts of 64 tokens; prefill is one prompt of 512. Cells are
tokens per second, best (median) of the rounds; ratios are medians of the ratios within each round.
"""

from __future__ import annotations

import argparse
import os
import random
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from child import Child
from models import DEMO, LARGE, LOGS, Model, prepare, prepare_genai

from plansmith.console import table

OURS = "plansmith"


@dataclass(frozen=True)
class Case:
    name: str
    batch_size: int
    prompt_tokens: int
    max_tokens: int

    def measure(self, child: Child, seed: int) -> float:
        """Tokens per second of one run; ``seed`` chooses the prompts."""
        rng = random.Random(seed)
        # Of SmolLM2's vocabulary, without the special tokens at its beginning.
        prompts = [[rng.randrange(100, 49_000) for _ in range(self.prompt_tokens)] for _ in range(self.batch_size)]
        measured = child.ask(prompts=prompts, max_tokens=self.max_tokens)
        if self.max_tokens == 1:
            return self.batch_size * self.prompt_tokens / float(measured["prefill_seconds"])
        return float(measured["decode_rate"])


def cases(max_tokens: int) -> list[Case]:
    decodes = [Case(f"decode, B = {size}", size, 64, max_tokens) for size in (1, 4, 16)]
    return [Case("prefill 512", 1, 512, 1), *decodes]


def start_children(model: Model, stack: ExitStack) -> dict[str, Child]:
    arguments = {
        OURS: f"{model.engine}{os.pathsep}{model.checkpoint}",
        "openvino_genai": f"{prepare_genai(model)}{os.pathsep}{model.engine}",
        "llama_cpp": str(model.gguf),
    }
    return {
        name: stack.enter_context(Child(LOGS / f"{name}.log", "contenders.py", name, argument))
        for name, argument in arguments.items()
    }


Rates = dict[str, list[float]]
"""Of one case: rates of every contender, round by round."""


def run_rounds(children: Mapping[str, Child], max_tokens: int, num_rounds: int) -> dict[str, Rates]:
    """Round 0 warms up and is not counted: first steps allocate, and clocks rise."""
    rates: dict[str, Rates] = {case.name: {name: [] for name in children} for case in cases(max_tokens)}
    for number in range(num_rounds + 1):
        for case in cases(max_tokens):
            for name, child in children.items():
                rate = case.measure(child, seed=number)
                if number:
                    rates[case.name][name].append(rate)
    return rates


def print_rates(model: str, rates: Mapping[str, Rates]) -> None:
    peers = [name for name in next(iter(rates.values())) if name != OURS]
    rows = []
    for case, by_name in rates.items():
        cells = [f"{max(values):.0f} ({median(values):.0f})" for values in by_name.values()]
        ratios = [
            median(ours / theirs for ours, theirs in zip(by_name[OURS], by_name[peer], strict=True)) for peer in peers
        ]
        rows.append([case, *cells, *(f"{ratio:.2f}" for ratio in ratios)])
    header = [f"{model}, tokens/s", OURS, *peers, *(f"/ {peer}" for peer in peers)]
    print(table(header, rows), end="\n\n", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gguf", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="one round of the small model: does it run at all?")
    parser.add_argument("--models", nargs="+", choices=[DEMO, LARGE], default=[DEMO, LARGE])
    arguments = parser.parse_args()
    names, num_rounds, max_tokens = arguments.models, arguments.rounds, 64
    if arguments.quick:
        names, num_rounds, max_tokens = [DEMO], 1, 32
    for model in prepare(arguments.gguf, names):
        with ExitStack() as stack:
            children = start_children(model, stack)
            print_rates(model.name, run_rounds(children, max_tokens, num_rounds))


if __name__ == "__main__":
    main()
