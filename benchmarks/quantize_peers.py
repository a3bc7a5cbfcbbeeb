"""Quantization beside nvidia-modelopt and llmcompressor: the same models, the same cores, one run.

usage: python benchmarks/quantize_peers.py [MODEL.gguf --calibrated --text FILE] [--only ROW ...] [--repeat N]

Every row is a process of its own, measured by os.wait4, start-up of its libraries included. Before a row the disk is
idle (sync) and the model is dropped from the page cache; a row ends when its output is on the disk (fsync). Without
--calibrated: casts and round-to-nearest of a random 0.85B Llama (`mid`), beside a plain copy that reads and writes as
many bytes. With it: AWQ and GPTQ of `mid` and of the demo's SmolLM2 (MODEL.gguf), on the same windows of tokens, and
the perplexity of SmolLM2 on --text. `make bench-peers` installs the peers; a peer that is missing is a line that says
so. Compare CPU seconds when the machine is not idle.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import yaml
from peers.comparison import COPY, MODELS, PLANSMITH, ROWS, Row, recipe_of
from peers.measured_process import Cost, RowError, run_measured
from peers.peer_tables import Results, calibrated_table, ratio_lines, uncalibrated_table

ROOT = Path(__file__).resolve().parent.parent
PEERS = ROOT / "benchmarks" / "peers"
CACHE = ROOT / ".cache"


@dataclass(frozen=True)
class Bench:
    """What every row needs."""

    arguments: argparse.Namespace
    scratch: Path

    @property
    def work(self) -> Path:
        return Path(self.arguments.work)

    def environment(self, tool: str) -> dict[str, str]:
        threads = {"OMP_NUM_THREADS": str(self.arguments.cores), "OMP_WAIT_POLICY": "passive"}
        kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        ours = {"PYTHONPATH": str(ROOT)} if tool == PLANSMITH else {}
        return {**kept, **threads, **ours, "HF_HUB_OFFLINE": "1", "HF_HOME": str(self.scratch / "hf")}

    def measure(self, name: str, tool: str, command: list[str], model: str) -> Cost:
        """Run one row; its output is then ``self.output``."""
        shutil.rmtree(self.output, ignore_errors=True)
        (self.work / "logs").mkdir(exist_ok=True)
        log = self.work / "logs" / f"{model}-{name}.log"
        environment, limit = self.environment(tool), self.arguments.limit
        return run_measured(command, self.work / model, self.output, log, environment, limit)

    @property
    def output(self) -> Path:
        return self.scratch / "output"

    def command(self, row: Row, model: str) -> list[str]:
        """Raises RowError when the tool is not installed."""
        source = str(self.work / model)
        if row.tool == PLANSMITH:
            recipe = self.scratch / f"{row.job}.yaml"
            recipe.write_text(yaml.safe_dump(recipe_of(row.job, MODELS[model], self.work / f"{model}.txt")))
            return [sys.executable, str(PEERS / "plansmith_job.py"), str(recipe), source, str(self.output)]
        python = Path(getattr(self.arguments, f"{row.tool}_python"))
        if not python.exists():
            raise RowError("not installed (make bench-peers)")
        job = [str(PEERS / f"{row.tool}_job.py"), row.job, source, str(self.output), str(self.arguments.cores)]
        windows = [str(self.work / f"{model}.npy")] if row.calibrated else []
        return [str(python.absolute()), *job, *windows]

    def copy(self, name: str, model: str, written: int) -> Cost:
        command = [sys.executable, str(PEERS / "plain_copy.py"), str(self.work / model), str(self.output), str(written)]
        return self.measure(name, COPY, command, model)

    def perplexity(self, checkpoint: Path, model: str) -> float:
        floats = self.scratch / "floats"
        shutil.rmtree(floats, ignore_errors=True)
        source, text = self.work / model, self.arguments.text
        command = [sys.executable, PEERS / "score_job.py", checkpoint, source / "tokenizer.json", text]
        command += [str(self.arguments.windows), floats]
        done = subprocess.run(command, env=self.environment(PLANSMITH), stdout=subprocess.PIPE)
        if done.returncode:  # the row's cost stands, and so do the other rows
            raise RowError("not scored")
        return float(done.stdout)


def run_row(bench: Bench, row: Row, model: str, results: Results) -> None:
    name = row.key
    try:
        cost = bench.measure(name, row.tool, bench.command(row, model), model)
        results.add(name, cost)
        if model == "smollm2" and bench.arguments.text and name not in results.perplexities:
            results.perplexities[name] = bench.perplexity(bench.output, model)
        if row.tool == PLANSMITH and not row.calibrated:
            copied = bench.copy(f"copy-of-{name}", model, weight_bytes(bench.output))
            results.add_copy(name, copied)
            print(f"{model} copy of the same bytes: {copied}", file=sys.stderr)
    except RowError as reason:
        results.reasons[name] = str(reason)
    told = results.costs[name] if name in results.costs else results.reasons[name]
    print(f"{model} {name}: {told}", file=sys.stderr)


def run_rows(bench: Bench, rows: list[Row], model: str, whole_copy: bool) -> Results:
    """In turns, so that what the machine does to one round it does to all rows."""
    results = Results()
    for _ in range(bench.arguments.repeat):
        for row in rows:
            if row.key not in results.reasons:
                run_row(bench, row, model, results)
        if whole_copy:
            results.add(COPY, bench.copy(COPY, model, weight_bytes(bench.work / model)))
    if model == "smollm2" and bench.arguments.text:
        results.perplexities["none"] = bench.perplexity(bench.work / model, model)
    return results


def weight_bytes(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.glob("*.safetensors"))


def prepare(name: str, arguments: argparse.Namespace) -> None:
    """Make a model unless it is there."""
    if not (arguments.work / name).exists():
        command = [sys.executable, PEERS / "bench_models.py", name, arguments.work / name]
        command += [arguments.model] if name == "smollm2" else []
        subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True)


def compare(bench: Bench, model: str, calibrated: bool) -> None:
    only = bench.arguments.only
    rows = [row for row in ROWS if row.calibrated == calibrated and (only is None or row.key in only)]
    whole_copy = not calibrated and (only is None or COPY in only)
    if not rows and not whole_copy:
        return
    prepare(model, bench.arguments)
    results = run_rows(bench, rows, model, whole_copy)
    if calibrated:
        windows = MODELS[model]
        print(f"\n{model}, calibrated on {windows.count} x {windows.length} tokens\n{calibrated_table(rows, results)}")
    else:
        print(f"\n{model}\n{uncalibrated_table(rows, results, weight_bytes(bench.work / model))}")
    print("\n".join(ratio_lines(rows, results)), flush=True)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, nargs="?", help="the demo's GGUF file, for --calibrated")
    parser.add_argument("--calibrated", action="store_true", help="AWQ and GPTQ in place of casts and RTN")
    parser.add_argument("--text", type=Path, help="to measure the perplexity of SmolLM2 on")
    parser.add_argument("--windows", type=int, default=8, help="of 512 tokens of --text (default 8)")
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS), help="with --calibrated")
    parser.add_argument("--only", nargs="+", metavar="ROW", choices=[*(row.key for row in ROWS), COPY])
    parser.add_argument("--repeat", type=int, default=1, help="rounds; the table has the best of each figure")
    parser.add_argument("--limit", type=float, default=1200, help="seconds for a row (default 1200)")
    parser.add_argument("--cores", type=int, default=2, help="for every row (default 2)")
    parser.add_argument("--work", type=Path, default=CACHE / "benchmarks" / "peers", help="for models and outputs")
    for tool in ("modelopt", "llmcompressor"):
        parser.add_argument(f"--{tool}-python", type=Path, default=CACHE / "peers" / tool / "bin" / "python")
    arguments = parser.parse_args()
    if arguments.calibrated and "smollm2" in arguments.models and arguments.model is None:
        parser.error("--calibrated needs MODEL.gguf, or --models mid")
    return arguments


def main() -> None:
    arguments = parse_arguments()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: arguments.cores])
    arguments.work.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=arguments.work) as scratch:
        bench = Bench(arguments, Path(scratch))
        for model in arguments.models if arguments.calibrated else ["mid"]:
            compare(bench, model, arguments.calibrated)


if __name__ == "__main__":
    main()
