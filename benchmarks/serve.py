"""Concurrent streams through Triton beside the same scheduler in process, in one run.

usage: python benchmarks/serve.py SmolLM2-135M-Instruct.Q4_1.gguf [--rounds N] [--quick]

N streams of SmolLM2-135M start at once, prompts of 32 to 64 tokens, 96 tokens each. "in process" hands the prompts to
the scheduler and takes its outputs, nothing more. "Triton" sends the same prompts over HTTP ``generate_stream`` to a
real server; its client, one light process for all streams, runs on the same cores and is part of what is measured.
Both take turns round by round. Rates are output tokens per second from the first request to the last token, best
(median) of the rounds; the ratio is the median of the ratios within each round; latencies are medians. A message of
several tokens shares its time among them (ITL).
"""

from __future__ import annotations

import argparse
import os
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import psutil
from child import Child
from models import HERE, LOGS, Model, prepare
from tokenizers import Tokenizer

from plansmith.console import table
from triton_repo import TritonServer

NUM_STREAMS = (1, 8, 32)
PROMPT_TOKENS = (32, 64)
TEXT = HERE.parent / "examples" / "demo" / "shakespeare.txt"
Measured = dict[str, Any]


def make_prompts(tokenizer: Tokenizer, count: int, seed: int) -> list[str]:
    """Pieces of a real text, 32 to 64 tokens long."""
    rng = random.Random(seed)
    ids = tokenizer.encode(TEXT.read_text(encoding="utf-8")).ids
    starts = [rng.randrange(len(ids) - PROMPT_TOKENS[1]) for _ in range(count)]
    return [tokenizer.decode(ids[start : start + rng.randint(*PROMPT_TOKENS)]) for start in starts]


class CpuMeter:
    """CPU time of processes by name, between two calls."""

    def __init__(self, processes: Mapping[str, psutil.Process]) -> None:
        self._processes = processes
        self._before = self._read()

    def used(self) -> dict[str, float]:
        """CPU seconds of each since the meter was made."""
        now = self._read()
        return {name: now[name] - self._before[name] for name in now}

    def _read(self) -> dict[str, float]:
        times = {name: process.cpu_times() for name, process in self._processes.items()}
        return {name: one.user + one.system for name, one in times.items()}


def server_processes(server: TritonServer, client: Child) -> dict[str, psutil.Process]:
    """Triton itself, the stub of the Python backend, the engine process, and the client."""
    triton = psutil.Process(server.pid)
    processes = {"tritonserver": triton, "client": psutil.Process(client.pid)}
    for process in triton.children(recursive=True):
        is_engine = any("engine_process" in part for part in process.cmdline())
        processes["engine process" if is_engine else "stub"] = process
    return processes


def run_rounds(ways: Mapping[str, Callable[..., Measured]], tokenizer: Tokenizer, rounds: int, tokens: int) -> None:
    """Measure every number of streams both ways, and print a row for each way."""
    rows = []
    for num_streams in NUM_STREAMS:
        results: dict[str, list[Measured]] = {name: [] for name in ways}
        for number in range(rounds + 1):  # round 0 warms up
            prompts = make_prompts(tokenizer, num_streams, seed=number)
            for name, run in ways.items():
                measured = run(prompts=prompts, max_tokens=tokens)
                if number:
                    results[name].append(measured)
        rows += [_row(num_streams, name, results) for name in ways]
    header = ["streams", "", "tokens/s", "ratio", "TTFT ms", "ITL ms", "CPU s by process"]
    print(table(header, rows))


def _row(num_streams: int, name: str, results: Mapping[str, list[Measured]]) -> list[object]:
    base, mine = next(iter(results.values())), results[name]
    ratio = median(one["rate"] / other["rate"] for one, other in zip(mine, base, strict=True))
    rates = [one["rate"] for one in mine]
    rate = f"{max(rates):.0f} ({median(rates):.0f})"
    ttft, itl = (1000 * median(one[key] for one in mine) for key in ("ttft", "itl"))
    cpu = ", ".join(f"{part} {median(one['cpu'][part] for one in mine):.2f}" for part in mine[0]["cpu"])
    return [num_streams, name, rate, f"{ratio:.2f}", f"{ttft:.0f}", f"{itl:.1f}", cpu]


def metered(child: Child, processes: Callable[[], dict[str, psutil.Process]]) -> Callable[..., Measured]:
    """``child.ask`` that also says how much CPU time the processes took."""

    def run(**question: Any) -> Measured:
        meter = CpuMeter(processes())
        return {**child.ask(**question), "cpu": meter.used()}

    return run


def compare(model: Model, rounds: int, tokens: int) -> None:
    tokenizer = Tokenizer.from_file(str(model.checkpoint / "tokenizer.json"))
    engine = f"{model.engine}{os.pathsep}{model.checkpoint}"
    in_process = Child(LOGS / "in-process.log", "contenders.py", "plansmith", engine)
    server = TritonServer(
        model.repository, http_port=0, grpc_port=0, metrics_port=0, log_file=LOGS / "tritonserver.log"
    )
    with in_process, server:
        url = f"{server.http_url}/v2/models/{server.model_name}/generate_stream"
        with Child(LOGS / "stream-client.log", "stream_client.py", url) as client:
            ways = {
                "in process": metered(in_process, lambda: {"engine": psutil.Process(in_process.pid)}),
                "Triton": metered(client, lambda: server_processes(server, client)),
            }
            run_rounds(ways, tokenizer, rounds, tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gguf", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="one short round: does it run at all?")
    arguments = parser.parse_args()
    (model,) = prepare(arguments.gguf)
    compare(model, *((1, 16) if arguments.quick else (arguments.rounds, 96)))


if __name__ == "__main__":
    main()
