"""``plansmith evaluate``: what quantization cost, measured on what is shipped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

import quantize
from plansmith.config import BuildFile
from plansmith.console import Console
from plansmith.options import current_options, global_options
from plansmith.standalone import section_settings
from plansmith.verify import check_report
from plansmith.verify.inputs import Inputs, load_tokenizer, read_inputs
from plansmith.verify.measure import describe_weights, measure
from plansmith.verify.page import check_page_path, write_page
from plansmith.verify.subject import Subject, loaded, look_at
from plansmith.verify.text import measurements_table, scheme_table, worst_table

_KEYS = {
    "text": "verify.perplexity.text",
    "window": "verify.perplexity.window",
    "windows": "verify.perplexity.max_windows",
    "choices": "verify.choices.questions",
    "labels": "verify.choices.labels",
}
_NUMBERS = ("window", "windows")


@click.command()
@click.argument("engine", type=click.Path(path_type=Path))
@click.option(
    "--against",
    required=True,
    metavar="SOURCE|ENGINE",
    type=click.Path(path_type=Path),
    help="The unquantized model, or an engine of it.",
)
@click.option("--text", metavar="FILE", help="UTF-8 text for perplexity, KL divergence and top-1 agreement.")
@click.option("--window", metavar="N", help="Tokens per window (512).")
@click.option("--windows", metavar="N", help="Windows to score (8).")
@click.option("--choices", metavar="FILE", help="Questions: JSON lines of {goal, sol1, sol2}, as PIQA has them.")
@click.option("--labels", metavar="FILE", help="Their answers, one per line: 0 for sol1, 1 for sol2.")
@click.option("--reference", is_flag=True, help="Run checkpoints in the float32 reference instead of compiling them.")
@click.option(
    "--tokenizer",
    metavar="CHECKPOINT",
    type=click.Path(path_type=Path),
    help="Checkpoint whose tokenizer is used, where neither ENGINE nor --against is one.",
)
@click.option("--html", metavar="OUT.html", type=click.Path(path_type=Path), help="Write the report as one HTML file.")
@global_options
def command(
    engine: Path, against: Path, reference: bool, tokenizer: Path | None, html: Path | None, **given: str | None
) -> None:
    """Measure what ENGINE (or a quantized checkpoint) gives away against the unquantized model.

    Limits with --set verify.kl.max_mean=0.1 and the like; exit code 3 when one is passed. A checkpoint is compiled for
    the CPU with ENGINE's own options, or with --set build.KEY=VALUE.
    """
    console = Console.current()
    build_file = _settings(given)
    if html is not None:
        check_page_path(html)
    ours, theirs = look_at(engine), look_at(against)
    if reference and ours.manifest is not None and theirs.manifest is not None:
        raise click.UsageError("--reference runs checkpoints, but ENGINE and --against are both engines")
    inputs = read_inputs(build_file.verify, load_tokenizer(_tokenizer_source(tokenizer, theirs, ours)))
    report = _evaluate(ours, theirs, inputs, build_file, reference, console)
    if html is not None:
        write_page(html, report)
    console.result({**report, "html": None if html is None else str(html)}, _as_text(report, html))
    check_report(report, build_file.verify)


def _settings(given: dict[str, str | None]) -> BuildFile:
    # Each option is short for a key of the build file; a JSON string is a YAML string, whatever the path holds.
    quoted = {name: value if name in _NUMBERS else json.dumps(value) for name, value in given.items() if value}
    short = [f"{_KEYS[name]}={value}" for name, value in quoted.items()]
    build_file = section_settings((*short, *current_options().settings), "verify", "build")
    if build_file.verify.perplexity is None and build_file.verify.choices is None:
        raise click.UsageError("nothing to measure; give --text FILE, or --choices FILE and --labels FILE, or both")
    return build_file


def _tokenizer_source(named: Path | None, *subjects: Subject) -> quantize.Checkpoint:
    if named is not None:
        return quantize.open_checkpoint(named)
    for subject in subjects:
        if subject.checkpoint is not None:
            return subject.checkpoint
    raise click.UsageError("two engines have no tokenizer; name a checkpoint of the model with --tokenizer CHECKPOINT")


def _evaluate(
    ours: Subject, theirs: Subject, inputs: Inputs, build_file: BuildFile, reference: bool, console: Console
) -> dict[str, Any]:
    compiled_like = ours.options() or theirs.options()
    asked = any(setting.split("=")[0].split(".")[0] == "build" for setting in current_options().settings)
    options = build_file.build if asked or compiled_like is None else compiled_like
    weights = ours.weights()
    with (
        loaded(ours, options, reference=reference, console=console) as (engine, engine_is),
        loaded(theirs, options, reference=reference, console=console) as (baseline, baseline_is),
        console.progress("measure") as progress,
    ):
        report = measure(engine, baseline, inputs, build_file.verify, progress)
    return {"engine": engine_is, "against": baseline_is, **report, **describe_weights(weights)}


def _as_text(report: dict[str, Any], html: Path | None) -> str:
    lines = [f"engine   {report['engine']}", f"against  {report['against']}", "", measurements_table(report)]
    if report["weights"]:
        lines += ["", scheme_table(report["schemes"]), "", worst_table(report["weights"])]
    if html is not None:
        lines += ["", f"report: {html}"]
    return "\n".join(lines)
