"""``plansmith doctor``: what can this machine do?"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from plansmith.console import Console
from plansmith.options import current_options, global_options

CANNOT_EXIT_CODE = 2


@click.command()
@click.argument("path", required=False, type=click.Path(path_type=Path))
@click.option(
    "--machine",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Ask for another machine: what 'plansmith doctor --output json' printed there.",
)
@global_options
def command(path: Path | None, machine: Path | None) -> int:
    """Say what this machine can compile, load and serve, and what it lacks.

    With PATH, an engine directory or a build file: can it be loaded, or built, here? Exit code 2 when it cannot.
    """
    if path is None:
        if machine is not None:
            raise click.UsageError("--machine needs PATH, an engine to be loaded there")
        return _survey()
    from plansmith.doctor.subject import diagnose, read_machine

    other = None if machine is None else read_machine(machine)
    found = diagnose(path, current_options().settings, other)
    where = "this machine" if machine is None else str(machine)
    answer = "can" if not found.problems else "cannot"
    lines = [f"{where} {answer} {found.question}: {found.path}", *(f"- {problem}" for problem in found.problems)]
    Console.current().result({**asdict(found), "machine": where, "can": not found.problems}, "\n".join(lines))
    return CANNOT_EXIT_CODE if found.problems else 0


def _survey() -> int:
    from plansmith.doctor.survey import survey
    from plansmith.doctor.text import survey_text

    found = survey()
    data = {**asdict(found), "machine": found.machine.model_dump(mode="json")}
    Console.current().result(data, survey_text(found))
    return 0
