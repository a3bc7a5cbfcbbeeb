"""``plansmith plan``: on which GPUs a model fits, how much it holds there, and what bounds its speed."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import click

from plansmith.console import Console
from plansmith.options import current_options, global_options

_COUNT = click.IntRange(min=1)


@click.command()
@click.argument("source", type=click.Path(path_type=Path))
@click.option(
    "--gpu", required=True, metavar="NAME", help="Such as h100-80g, l40s, b200; a wrong name lists the nearest."
)
@click.option("--gpus", "num_gpus", type=_COUNT, metavar="N", help="How many there are (8).")
@click.option(
    "--weights", metavar="NAME", help="fp16, bf16, fp8, int8, int4, nvfp4 or another recipe; default: as SOURCE says."
)
@click.option(
    "--kv-cache",
    type=click.Choice(["fp16", "bf16", "fp8", "int8"]),
    help="Type of keys and values; default: as SOURCE says.",
)
@click.option("--context", type=_COUNT, metavar="N", help="Tokens of a sequence, prompt and answer (max_seq_len).")
@click.option(
    "--batch",
    "batch_size",
    type=click.IntRange(1, 4096),
    default=1,
    metavar="N",
    help="Sequences that must fit at once (1).",
)
@click.option("--tp", "tp_size", type=_COUNT, metavar="N", help="Tensor-parallel size; default: every legal one.")
@click.option("--pp", "pp_size", type=_COUNT, metavar="N", help="Pipeline stages; default: every legal number.")
@click.option("--ep", "ep_size", type=_COUNT, metavar="N", help="Expert-parallel size; default: 1 and all of tp.")
@click.option(
    "--plot", metavar="FILE", type=click.Path(path_type=Path), help="Write a plot: .svg, or .html with tables."
)
@global_options
def command(source: Path, plot: Path | None, **given: Any) -> None:
    """Plan the memory and speed of SOURCE: a build file, a checkpoint or a config.json; weights are not read.

    Sizes are computed as the engine lays them out; times are the roofline's, the least that the hardware allows. Limits
    with --set build.max_batch_size=64 and the like. Exit code 2 when the model does not fit.
    """
    from builder.planner.plan import plan_capacity
    from plansmith.capacity.misfit import check_fits
    from plansmith.capacity.plot import check_plot_path, write_plot
    from plansmith.capacity.report import describe
    from plansmith.capacity.request import PlanOptions, make_request
    from plansmith.capacity.source import read_source

    if plot is not None:
        check_plot_path(plot)
    plan = plan_capacity(make_request(read_source(source, current_options().settings), PlanOptions(**given)))
    check_fits(plan)
    report = describe(plan, str(source))
    if plot is not None:
        write_plot(plot, report, plan)
    Console.current().result({**report, "plot": None if plot is None else str(plot)}, _as_text(report))


def _as_text(report: dict[str, Any]) -> str:
    from plansmith.capacity.text import as_rich, as_text

    if current_options().output == "text" and sys.stdout.isatty():
        return as_rich(report, shutil.get_terminal_size().columns)
    return as_text(report)
