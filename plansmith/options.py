"""The options that every verb understands, defined once and accepted before or after the verb."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import click


@dataclass(frozen=True)
class GlobalOptions:
    output: Literal["text", "json"] = "text"
    verbosity: int = 0  # -1 quiet, 0 normal, 1 verbose
    settings: tuple[str, ...] = ()  # "a.b=c" overrides of the build file


def current_options() -> GlobalOptions:
    """The options of the command that is running."""
    options = click.get_current_context().find_root().obj
    return options if isinstance(options, GlobalOptions) else GlobalOptions()


def global_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add --output, --set, --quiet and --verbose; what follows the verb wins over what stands before it."""

    @click.option(
        "--output", "output_format", type=click.Choice(["text", "json"]), help="Format of the result on stdout."
    )
    @click.option(
        "--set",
        "settings",
        multiple=True,
        metavar="KEY=VALUE",
        help="Set a key of the build file, such as build.max_seq_len=2048 (all keys: plansmith schema).",
    )
    @click.option("-q", "--quiet", is_flag=True, help="Errors and warnings only.")
    @click.option("-v", "--verbose", is_flag=True, help="Say more.")
    @functools.wraps(function)
    def wrapper(
        *args: Any, output_format: Any, settings: tuple[str, ...], quiet: bool, verbose: bool, **kwargs: Any
    ) -> Any:
        if quiet and verbose:
            raise click.UsageError("--quiet and --verbose exclude each other")
        options = current_options()
        options = replace(options, settings=options.settings + settings, output=output_format or options.output)
        if quiet or verbose:
            options = replace(options, verbosity=1 if verbose else -1)
        click.get_current_context().find_root().obj = options
        return function(*args, **kwargs)

    return wrapper


executor_option = click.option(
    "--executor",
    type=click.Choice(["local", "ray"]),
    help="Where the ranks of a GPU target are built: processes of this machine, or a Ray cluster (build.executor).",
)


def build_settings(executor: str | None) -> tuple[str, ...]:
    """The settings that were given, and those that the options of a verb that builds stand for."""
    given = current_options().settings
    return given if executor is None else (f"build.executor={executor}", *given)
