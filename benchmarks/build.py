"""Plans of a model of the shape of 1B Llamas: what a build takes besides the vendor's compiler, in time and in memory.

    python benchmarks/build.py MODEL [--work DIR] [--sm 89] [--tp 8] [CASE ...]

MODEL lends its tokenizer; the random weights are bfloat16. Cases with weights in the plan: fp16, bf16 (as the source
is stored), int4, fp8; with weights beside it: int4-external, fp16-external; fp16-tp8: eight ranks, as many at a time
as memory allows. The peer is a plain script over
TensorRT's own API (peers/plain_tensorrt.py) that compiles the same network. Both are processes of their own, measured
from outside: seconds, and the peak of the resident memory of the process that compiles. ``outside`` is the share of
the whole command that was not spent in the vendor's own call.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from random_llama import write_checkpoint

from quantize import open_checkpoint

CASES = ("fp16", "bf16", "int4", "fp8", "fp16-external", "int4-external", "fp16-tp8")
RECIPES = {"int4": "int4-rtn", "fp8": "fp8"}
_PEER = Path(__file__).parent / "peers" / "plain_tensorrt.py"
ROW = "{:<16}{:<12}{:>9}{:>9}{:>9}{:>10}{:>11}{:>11}"


@dataclass
class Built:
    seconds: float
    compiler_seconds: float
    plan_bytes: int
    peak_bytes: int
    num_ranks: int = 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("cases", nargs="*", default=CASES, metavar="CASE")
    parser.add_argument("--work", type=Path, help="directory for checkpoints and plans; a temporary one by default")
    parser.add_argument("--sm", type=int, default=89)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.work) as folder:
        work = Path(folder)
        write_checkpoint(_new(work / "source"), open_checkpoint(arguments.model))
        print(ROW.format("case", "by", "seconds", "compiler", "outside", "plan GB", "peak GB", "peak/plan"))
        for case in arguments.cases:
            checkpoint = _checkpoint(work, case.split("-")[0])
            _print(case, "plansmith", _plansmith(checkpoint, work / "engine", case, arguments.sm))
            if case in ("fp16", "int4", "fp8"):
                _print(case, "plain script", _plain(checkpoint, work / "plain.plan", arguments.sm))
        _again(work, arguments.sm)


def _checkpoint(work: Path, precision: str) -> Path:
    """The random model in ``precision``, quantized once."""
    if precision in ("fp16", "bf16"):
        return work / "source"
    output = work / precision
    if not output.exists():
        _run([*_verb("quantize"), work / "source", "-o", output, "--recipe", RECIPES[precision]])
    return output


def _plansmith(checkpoint: Path, engine: Path, case: str, sm: int) -> Built:
    shutil.rmtree(engine, ignore_errors=True)
    settings = [*_target(sm), f"build.weights={'external' if case.endswith('external') else 'embedded'}"]
    settings += ["build.dtype=bfloat16"] if case == "bf16" else []
    settings += ["build.tp_size=8"] if case.endswith("tp8") else []
    seconds = _run([*_verb("build"), checkpoint, "-o", engine, *_set(settings)])
    ranks = json.loads((engine / "engine.json").read_text())["gpu"]["ranks"]
    return Built(
        seconds,
        sum(plan["build_seconds"] for rank in ranks for plan in rank["plans"]),
        max(sum((engine / plan["file"]).stat().st_size for plan in rank["plans"]) for rank in ranks),
        max(rank["peak_rss_bytes"] for rank in ranks),
        len(ranks),
    )


def _plain(checkpoint: Path, plan: Path, sm: int) -> Built:
    begin = time.perf_counter()
    command = [sys.executable, _PEER, checkpoint, plan, "--sm", str(sm)]
    process = subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE, env=_environment(), text=True)
    assert process.stdout is not None  # noqa: S101 - a pipe was asked for
    output = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        sys.exit(f"{command}: failed")
    size = plan.stat().st_size
    plan.unlink()
    return Built(time.perf_counter() - begin, float(output), size, usage.ru_maxrss * 1024)


def _again(work: Path, sm: int) -> None:
    """A pipeline whose build is there already."""
    build_file = work / "build.yaml"
    settings = "\n".join(f"  {line.removeprefix('build.').replace('=', ': ', 1)}" for line in _target(sm))
    build_file.write_text(f"model: {work / 'source'}\nquantize:\n  recipe: int4-rtn\nbuild:\n{settings}\n")
    first, second = (_run([*_verb("run"), build_file]) for _ in range(2))
    print(f"\nthe pipeline of an int4 model: {first:.1f} s, again with nothing changed: {second:.2f} s")


def _target(sm: int) -> list[str]:
    return ["build.target=tensorrt-rtx", f"build.sms=[{sm}]", "build.max_seq_len=4096"]


def _set(settings: list[str]) -> list[str]:
    return [word for setting in settings for word in ("--set", setting)]


def _verb(name: str) -> list[str]:
    return [sys.executable, "-m", "plansmith", name, "-q"]


def _run(command: list[Any]) -> float:
    begin = time.perf_counter()
    subprocess.run(list(map(str, command)), check=True, stdout=subprocess.DEVNULL, env=_environment())
    return time.perf_counter() - begin


def _environment() -> dict[str, str]:
    root = str(Path(__file__).parent.parent)
    return {**os.environ, "PYTHONPATH": root}


def _new(path: Path) -> Path:
    path.mkdir()
    return path


def _print(case: str, by: str, built: Built) -> None:
    row = (
        f"{built.seconds:.1f}",
        f"{built.compiler_seconds:.1f}",
        "-" if built.num_ranks > 1 else f"{1 - built.compiler_seconds / built.seconds:.0%}",  # ranks overlap
        f"{built.plan_bytes / 1e9:.2f}",
        f"{built.peak_bytes / 1e9:.2f}",
        f"{built.peak_bytes / built.plan_bytes:.1f}",
    )
    print(ROW.format(case, by, *row), flush=True)


if __name__ == "__main__":
    main()
