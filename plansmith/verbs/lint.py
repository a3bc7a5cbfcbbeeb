"""``plansmith lint``: is this checkpoint what its config.json says?"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from plansmith.console import Console
from plansmith.options import global_options
from quantize.lint import lint_checkpoint

FINDINGS_EXIT_CODE = 2


@click.command()
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.option("--tp", "tp_size", type=click.IntRange(min=1), help="Can it be cut over this many tensor-parallel ranks?")
@click.option("--pp", "pp_size", type=click.IntRange(min=1), help="Can it be cut into this many pipeline stages?")
@click.option("--values", "check_values", is_flag=True, help="Read every value: NaN, infinity, scales of zero.")
@global_options
def command(checkpoint: Path, tp_size: int | None, pp_size: int | None, check_values: bool) -> int:
    """Check CHECKPOINT: a Hugging Face model, what quantize or export wrote, or a TensorRT-LLM checkpoint.

    One line per finding on stdout; exit code 0 when there is none, 2 otherwise. Without --values only headers are read.
    """
    findings = lint_checkpoint(checkpoint, tp_size=tp_size, pp_size=pp_size, check_values=check_values)
    Console.current().result(
        {"path": str(checkpoint), "findings": [asdict(finding) for finding in findings]},
        "\n".join(map(str, findings)) or f"{checkpoint}: no findings",
    )
    return FINDINGS_EXIT_CODE if findings else 0
