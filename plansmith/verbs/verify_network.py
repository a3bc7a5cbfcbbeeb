"""``plansmith verify-network``: a TensorRT build's numbers, proven without a GPU."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

import builder
import quantize
from plansmith.console import Console, table
from plansmith.options import current_options, global_options
from plansmith.standalone import section_settings
from plansmith.verify.inputs import load_tokenizer
from plansmith.verify.limits import VerificationError
from plansmith.verify.questions import read_utf8
from plansmith_errors import ConfigError

_FEWEST_TOKENS = 16


@click.command()
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.option(
    "--target",
    type=click.Choice(["tensorrt-rtx", "tensorrt"]),
    default="tensorrt-rtx",
    show_default=True,
    help="Short for --set build.target=.",
)
@click.option(
    "--text", metavar="FILE", type=click.Path(path_type=Path), help="UTF-8 text to run on; random tokens without it."
)
@click.option("--exact", is_flag=True, help="Compute in float32: no rounding hides a mistake.")
@global_options
def command(checkpoint: Path, target: str, text: Path | None, exact: bool) -> None:
    """Interpret the networks that CHECKPOINT compiles to, of all ranks, on the CPU against the float32 reference.

    Steps mix prefill and decode over a KV cache that begins as garbage. Build options with --set build.tp_size=2 and
    the like. Exit code 3 when a bound is passed. What the vendor's own kernels compute is not seen: that needs a GPU.
    """
    console = Console.current()
    settings = (f"build.target={target}", *current_options().settings)
    options = section_settings(settings, "build").build
    token_ids = None if text is None else _token_ids(checkpoint, text)
    with console.progress("verify") as progress:
        report = builder.verify_network(checkpoint, options, token_ids, exact=exact, progress=progress)
    console.result(_as_data(report, options), _as_text(report, options))
    _check(report)


def _token_ids(checkpoint: Path, text: Path) -> list[int]:
    tokenizer = load_tokenizer(quantize.open_checkpoint(checkpoint))
    ids: list[int] = tokenizer.encode(read_utf8(text, "--text"), add_special_tokens=False).ids
    if len(ids) < _FEWEST_TOKENS:
        raise ConfigError(f"--text: {text} has {len(ids)} tokens; expected {_FEWEST_TOKENS} or more")
    return ids


def _as_data(report: builder.GateReport, options: builder.BuildOptions) -> dict[str, Any]:
    bounds = {"rms_error": report.bounds.rms_error, "max_error": report.bounds.max_error}
    return {
        **asdict(report),
        "bounds": {**bounds, "outlier_share": report.bounds.outlier_share},
        "target": options.target,
        "parallelism": asdict(options.parallelism),
        "passed": report.failed is None,
    }


def _as_text(report: builder.GateReport, options: builder.BuildOptions) -> str:
    ranks, bounds = options.parallelism, report.bounds
    rows = [
        (
            f"{step.number}  {step.what}",
            step.num_tokens,
            f"{step.max_abs_error:.2g}",
            f"{step.max_error:.2g}",
            f"{step.rms_error:.2g}",
            f"{step.same_argmax}/{step.num_tokens}",
            f"{step.kl:.2g}",
        )
        for step in report.steps
    ]
    rounded = f", rounding to {' and '.join(report.roundings)}" if report.roundings else ""
    lines = [
        f"{options.target} in {report.dtype}{rounded}; tp {ranks.tp_size}, pp {ranks.pp_size}, ep {ranks.ep_size}; "
        f"sequences of up to {report.longest_sequence} tokens",
        "",
        table(("step", "tokens", "max error", "in deviations", "worst rms", "same argmax", "KL"), rows),
        "",
        f"bounds, in standard deviations of the reference's logits: {bounds.max_error:.2g} of any, "
        f"{bounds.rms_error:.2g} rms of a token (docs/verify-network.md)",
    ]
    if report.unreached_window is not None:
        lines.append(f"not checked: the sliding window of {report.unreached_window} tokens, which no sequence reaches")
    return "\n".join(lines)


def _check(report: builder.GateReport) -> None:
    step = report.failed
    if step is None:
        return
    first = report.culprit
    where = f"; the first module beyond it is {first.module}" if first is not None else "; no single module stands out"
    raise VerificationError(
        f"step {step.number} ({step.what}): {step.num_outliers} of {step.num_tokens} tokens are beyond the bounds, the "
        f"largest error is {step.max_error:.3g} standard deviations{where}"
    )
