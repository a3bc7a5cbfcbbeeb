"""``plansmith schema``: the JSON Schema of build files, for editors and CI."""

from __future__ import annotations

import json

import click

from plansmith.config import json_schema
from plansmith.console import Console
from plansmith.options import global_options


@click.command()
@global_options
def command() -> None:
    """Print the JSON Schema of build files."""
    schema = json_schema()
    Console.current().result(schema, json.dumps(schema, indent=2))
