"""``plansmith package``: an engine and its checkpoint's tokenizer to a Triton model repository."""

from __future__ import annotations

from pathlib import Path

import click

import triton_repo
from plansmith.console import Console
from plansmith.directories import output_directory
from plansmith.options import current_options, global_options
from plansmith.standalone import section_settings
from plansmith.version import __version__


@click.command()
@click.argument("engine", type=click.Path(path_type=Path))
@click.option(
    "--checkpoint",
    required=True,
    type=click.Path(path_type=Path),
    help="Checkpoint the engine was built from: its tokenizer and chat template are packaged.",
)
@click.option("-o", "--output-dir", required=True, type=click.Path(path_type=Path), help="New directory to write.")
@global_options
def command(engine: Path, checkpoint: Path, output_dir: Path) -> None:
    """Write a Triton model repository around ENGINE; options with --set package.KEY=VALUE."""
    options = section_settings(current_options().settings, "package").package
    with output_directory(output_dir) as partial:
        triton_repo.write_repository(engine, checkpoint, partial, options, plansmith_version=__version__)
    Console.current().result({"path": str(output_dir)}, f"{output_dir}: serve it with plansmith serve {output_dir}")
