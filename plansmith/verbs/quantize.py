"""``plansmith quantize``: a source checkpoint to a quantized checkpoint."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

import quantize
from plansmith.calibration import calibration_tools, quantize_dependencies
from plansmith.console import Console, human_bytes
from plansmith.directories import output_directory, resume_state
from plansmith.fingerprint import file_stamp, fingerprint
from plansmith.options import current_options, global_options
from plansmith.standalone import section_settings


@click.command()
@click.argument("source", type=click.Path(path_type=Path))
@click.option("-o", "--output-dir", required=True, type=click.Path(path_type=Path), help="New directory to write.")
@click.option("--recipe", metavar="NAME|FILE", help=f"Recipe: {', '.join(quantize.list_recipes())} or a YAML file.")
@global_options
def command(source: Path, output_dir: Path, recipe: str | None) -> None:
    """Quantize SOURCE (a safetensors directory or a GGUF file) to a neutral quantized checkpoint."""
    console = Console.current()
    build_file = section_settings(current_options().settings, "quantize", model=str(source))
    chosen = quantize.load_recipe(recipe or build_file.quantize.recipe)
    tools = calibration_tools(chosen, build_file.quantize.calibration, console)
    with output_directory(output_dir) as partial, console.progress("quantize") as progress:
        stamps = [file_stamp(file) for file in quantize.open_checkpoint(source).source_files()]
        depends_on = quantize_dependencies(chosen, build_file.quantize.calibration, stamps)
        resume = quantize.Resume(resume_state(output_dir), fingerprint(depends_on), console.resuming)
        report = quantize.quantize_checkpoint(
            source, partial, chosen, progress=progress, calibration_tools=tools, resume=resume
        )
    tensors = [
        {**asdict(t), "relative_error": t.relative_error, "bits_per_weight": t.bits_per_weight} for t in report.tensors
    ]
    console.result(
        {"path": str(output_dir), "recipe": report.recipe, "origin": report.origin, "tensors": tensors},
        f"{output_dir}: {human_bytes(report.bytes_in)} -> {human_bytes(report.bytes_out)} in {report.seconds:.1f} s",
    )
