"""How many greedy continuations stay the same when a request shares its batch with others?

32 requests of different lengths join at random times and are compared, token for token, with what each gives alone; in
both precisions of the CPU engine. In ``exact`` all must be equal. In ``fast`` the shape of a batch now and then decides
between nearly equal logits, and all that follows differs.

usage: python benchmarks/identity.py MODEL.gguf
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile
import time
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

import builder
from plansmith.console import table
from plansmith.version import __version__
from plugins.generation import GenerationOutput, GenerationRequest, SamplingParams
from plugins.inflight_batching.generator import InflightGenerator
from plugins.inflight_batching.offline import OutputCollector, generate
from quantize import load_recipe, open_checkpoint, quantize_checkpoint

RECIPE = Path(__file__).parent.parent / "examples" / "demo" / "recipe.yaml"
TEXT = RECIPE.parent / "shakespeare.txt"
NUM_STREAMS, MAX_PROMPT, MAX_TOKENS, ARRIVAL_SECONDS = 32, 96, 64, 2.0

Job = tuple[list[int], SamplingParams]


def make_jobs(tokenizer: Tokenizer, seed: int) -> list[Job]:
    rng = random.Random(seed)
    ids = tokenizer.encode(TEXT.read_text(), add_special_tokens=False).ids
    jobs = []
    for _ in range(NUM_STREAMS):
        begin = rng.randrange(len(ids) - MAX_PROMPT)
        prompt = ids[begin : begin + rng.randint(4, MAX_PROMPT)]
        sampling = SamplingParams(max_tokens=rng.randint(16, MAX_TOKENS), temperature=0.0, ignore_eos=True)
        jobs.append((prompt, sampling))
    return jobs


def run_together(engine_dir: Path, tokenizer: Tokenizer, jobs: list[Job], seed: int) -> list[GenerationOutput]:
    rng = random.Random(seed)
    engine, collector = builder.load_engine(engine_dir), OutputCollector()
    generator = InflightGenerator(engine, tokenizer, [], collector)
    try:
        for number, (prompt, sampling) in enumerate(jobs):
            generator.submit(GenerationRequest(str(number), prompt, sampling))
            time.sleep(rng.uniform(0, 2 * ARRIVAL_SECONDS / NUM_STREAMS))
        return collector.wait(map(str, range(len(jobs))))
    finally:
        generator.close()
        engine.close()


def run_alone(engine_dir: Path, tokenizer: Tokenizer, jobs: list[Job]) -> list[GenerationOutput]:
    engine = builder.load_engine(engine_dir)
    try:
        return [generate(engine, tokenizer, [], [prompt], sampling)[0] for prompt, sampling in jobs]
    finally:
        engine.close()


def common_prefix(a: GenerationOutput, b: GenerationOutput) -> float:
    """Share of the continuation before the first difference."""
    length = min(len(a.token_ids), len(b.token_ids))
    differs = np.flatnonzero(np.array(a.token_ids[:length]) != np.array(b.token_ids[:length]))
    return float(differs[0] / length) if len(differs) else 1.0


def measure(quantized: Path, tokenizer: Tokenizer, precision: str, rounds: int, scratch: Path) -> list[str]:
    engine_dir = scratch / precision
    engine_dir.mkdir()
    options = builder.BuildOptions.model_validate({"precision": precision, "max_seq_len": 512})
    builder.build_engine(quantized, engine_dir, options, plansmith_version=__version__)
    prefixes: list[float] = []
    for seed in range(rounds):
        jobs = make_jobs(tokenizer, seed)
        together, alone = run_together(engine_dir, tokenizer, jobs, seed), run_alone(engine_dir, tokenizer, jobs)
        prefixes += map(common_prefix, together, alone)
    equal = sum(prefix == 1.0 for prefix in prefixes)
    return [precision, f"{equal} of {len(prefixes)}", f"{100 * np.mean(prefixes):.1f} %"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    tokenizer = Tokenizer.from_str(open_checkpoint(arguments.model).side_files()["tokenizer.json"].decode())
    with tempfile.TemporaryDirectory() as scratch:
        quantize_checkpoint(arguments.model, Path(scratch) / "quantized", load_recipe(str(RECIPE)))
        rows = [
            measure(Path(scratch) / "quantized", tokenizer, precision, arguments.rounds, Path(scratch))
            for precision in ("exact", "fast")
        ]
    print(f"{NUM_STREAMS} requests, joining at random times, against each alone; {os.cpu_count()} cores\n")
    print(table(["precision", "equal continuations", "tokens before the first difference"], rows))


if __name__ == "__main__":
    main()
