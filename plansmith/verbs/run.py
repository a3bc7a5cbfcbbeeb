"""``plansmith run``: the whole pipeline of a build file."""

from __future__ import annotations

import time
from pathlib import Path

import click

from builder.compatibility import check_target_runs
from plansmith.config import load_build_file
from plansmith.console import Console, human_bytes, table
from plansmith.options import build_settings, executor_option, global_options
from plansmith.pipeline import Pipeline, PipelineResult
from plansmith.serving import serve_in_foreground
from plansmith.store import open_store
from plansmith.verify import check_report
from plansmith.verify.text import summary_lines


@click.command()
@click.argument("build_yaml", type=click.Path(path_type=Path))
@click.option("--serve", is_flag=True, help="Serve the repository afterwards, until Ctrl-C.")
@executor_option
@global_options
def command(build_yaml: Path, serve: bool, executor: str | None) -> None:
    """Bring every stage of BUILD_YAML up to date and print where the model repository is.

    A second run with nothing changed does no work. A run that was killed goes on where it stopped.
    """
    console = Console.current()
    build_file = load_build_file(build_yaml, build_settings(executor))
    if serve:
        check_target_runs(build_file.build.target)  # not after minutes of work
    started = time.monotonic()
    with open_store(build_file.store) as store:
        result = Pipeline(build_file, store, console).run()
    if result.up_to_date:
        console.info(f"nothing to do: every stage is up to date ({time.monotonic() - started:.2f} s)")
    console.result(_as_data(result), _as_text(result))
    check_report(result.report, build_file.verify)
    if serve:
        serve_in_foreground(result.repository, build_file.serve, console)


def _as_data(result: PipelineResult) -> dict[str, object]:
    stages = [
        {
            "stage": s.stage,
            "key": s.key,
            "path": str(s.payload),
            "seconds": s.seconds,
            "bytes": s.num_bytes,
            "reused": s.reused,
        }
        for s in result.stages
    ]
    return {
        "stages": stages,
        "repository": str(result.repository),
        "report": result.report,
        "cannot_run": result.cannot_run,
        "verify_skipped": result.is_verify_skipped,
    }


def _as_text(result: PipelineResult) -> str:
    rows = [[s.stage, f"{s.seconds:.1f}", human_bytes(s.num_bytes)] for s in result.stages]
    lines = [table(["stage", "seconds", "size"], rows)]
    if result.report is not None:
        lines += summary_lines(result.report)
    lines.append(f"repository: {result.repository}")
    if result.is_verify_skipped:
        lines.append("verify: skipped, so its limits are not held to")
    if result.cannot_run is not None:
        lines.append(f"not for this machine to serve: it {result.cannot_run}")
    else:
        lines.append(f"serve it with: plansmith serve {result.repository}")
    return "\n".join(lines)
