"""``plansmith serve``: a model repository behind Triton, until Ctrl-C."""

from __future__ import annotations

from pathlib import Path

import click

from plansmith.console import Console
from plansmith.options import current_options, global_options
from plansmith.serving import serve_in_foreground
from plansmith.standalone import section_settings


@click.command()
@click.argument("repository", type=click.Path(path_type=Path))
@global_options
def command(repository: Path) -> None:
    """Serve REPOSITORY with Triton; ports with --set serve.http_port=8080.

    Prints the URLs when the model is ready. Ctrl-C finishes open streams and stops; a second one stops at once.
    """
    settings = section_settings(current_options().settings, "serve")
    serve_in_foreground(repository, settings.serve, Console.current())
