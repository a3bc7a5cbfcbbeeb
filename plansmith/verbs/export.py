"""``plansmith export``: a quantized checkpoint to the layout that a GPU run-time loads."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import get_args

import click

from plansmith.console import Console, human_bytes
from plansmith.directories import output_directory
from plansmith.options import global_options
from quantize.export import ExportOptions, export_checkpoint
from quantize.export.options import LABELS, Consumer, DtypeChoice, Format


@click.command()
@click.argument("quantized", type=click.Path(path_type=Path))
@click.option("-o", "--output-dir", required=True, type=click.Path(path_type=Path), help="New directory to write.")
@click.option("--format", "layout", required=True, type=click.Choice(get_args(Format)), help="Layout to write.")
@click.option(
    "--consumer",
    type=click.Choice(get_args(Consumer)),
    help="Run-time that will load it; what it would refuse is refused here. Default: the format's own.",
)
@click.option("--tp", "tp_size", default=1, show_default=True, help="Tensor-parallel ranks (trtllm).")
@click.option("--pp", "pp_size", default=1, show_default=True, help="Pipeline stages (trtllm).")
@click.option(
    "--dtype",
    default="auto",
    show_default=True,
    type=click.Choice(get_args(DtypeChoice)),
    help="Type of what is not quantized.",
)
@global_options
def command(
    quantized: Path,
    output_dir: Path,
    layout: Format,
    consumer: Consumer | None,
    tp_size: int,
    pp_size: int,
    dtype: DtypeChoice,
) -> None:
    """Export QUANTIZED, which `plansmith quantize` wrote (or an original model), for a GPU run-time."""
    console = Console.current()
    options = ExportOptions(layout, consumer, tp_size, pp_size, dtype)
    with output_directory(output_dir) as partial, console.progress("export") as progress:
        report = export_checkpoint(quantized, partial, options, progress=progress)
    console.result(
        {"path": str(output_dir), "format": layout, **asdict(report)},
        f"{output_dir}: {report.scheme}, {human_bytes(report.bytes_out)} for {LABELS[report.consumer]} "
        f"in {report.seconds:.1f} s",
    )
