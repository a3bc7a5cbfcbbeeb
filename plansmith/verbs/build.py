"""``plansmith build``: a checkpoint to an engine directory."""

from __future__ import annotations

from pathlib import Path

import click

import builder
from plansmith.console import Console, human_bytes
from plansmith.directories import directory_size, output_directory, resume_state
from plansmith.options import build_settings, executor_option, global_options
from plansmith.standalone import section_settings
from plansmith.version import __version__


@click.command()
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.option("-o", "--output-dir", required=True, type=click.Path(path_type=Path), help="New directory to write.")
@click.option(
    "--plans",
    metavar="ENGINE",
    type=click.Path(path_type=Path),
    help="Take the plans of ENGINE, which has external weights and a model of the same shape: nothing is compiled.",
)
@executor_option
@global_options
def command(checkpoint: Path, output_dir: Path, plans: Path | None, executor: str | None) -> None:
    """Compile CHECKPOINT (quantized or not) to an engine; options with --set build.KEY=VALUE."""
    console = Console.current()
    options = section_settings(build_settings(executor), "build").build
    with output_directory(output_dir) as partial, console.progress("build") as progress:
        builder.build_engine(
            checkpoint,
            partial,
            options,
            plansmith_version=__version__,
            progress=progress,
            plans=plans,
            resume_state=resume_state(output_dir),
        )
    size = directory_size(output_dir)
    console.result({"path": str(output_dir), "bytes": size}, f"{output_dir}: engine of {human_bytes(size)}")
