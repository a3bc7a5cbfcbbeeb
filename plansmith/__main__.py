"""The ``plansmith`` command: global options, lazily loaded verbs, and the one place where errors become exit codes."""

from __future__ import annotations

import difflib
import importlib
import sys

import click

from plansmith.options import global_options
from plansmith.version import __version__
from plansmith_errors import PlansmithError

# Help must not import a verb: each costs more than the 0.3 s that `plansmith --help` may take.
VERBS = {
    "run": "Run the whole pipeline of a build file: quantize, build, package, verify.",
    "quantize": "Quantize a checkpoint to a neutral quantized checkpoint.",
    "export": "Write a quantized checkpoint in the layout of a GPU run-time.",
    "lint": "Check that a checkpoint is what its config.json says.",
    "build": "Compile a checkpoint to an engine directory.",
    "package": "Write a Triton model repository around an engine.",
    "serve": "Serve a model repository with Triton until Ctrl-C.",
    "evaluate": "Measure what quantization cost: perplexity, KL divergence, choices.",
    "plan": "Say on which GPUs a model fits, what it holds there and what bounds its speed.",
    "verify-network": "Run a TensorRT build's networks on the CPU against the reference.",
    "inspect": "Say what a checkpoint, engine, repository or build file is.",
    "doctor": "Say what this machine can compile, load and serve, and what it lacks.",
    "schema": "Print the JSON Schema of build files.",
}

# What other tools call these things.
_OTHER_WORDS = {
    "compile": "build",
    "convert": "quantize",
    "check": "lint",
    "diagnose": "doctor",
    "start": "serve",
    "show": "inspect",
    "measure": "evaluate",
    "size": "plan",
    "capacity": "plan",
}


class LazyGroup(click.Group):
    """A group whose commands are imported when they are run, not when they are listed."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command:
        if cmd_name not in VERBS:
            near = difflib.get_close_matches(cmd_name, [*VERBS, *_OTHER_WORDS], n=1)
            known = _OTHER_WORDS.get(near[0], near[0]) if near else None
            hint = f"did you mean {known!r}?" if known else f"verbs: {', '.join(VERBS)}"
            raise click.UsageError(f"there is no verb {cmd_name!r}; {hint}")
        command: click.Command = importlib.import_module(f"plansmith.verbs.{cmd_name.replace('-', '_')}").command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(VERBS.items()))


@click.command(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Start with a build file of one line, 'model: path/to/model': plansmith run build.yaml --serve. "
    "Options may stand before or after a verb; what stands after it wins.",
)
@click.version_option(__version__, prog_name="plansmith")
@global_options
def cli() -> None:
    """From a checkpoint to a running, verified language-model service."""


def main() -> None:
    """Run the command. Exit codes: 0 done, 2 something for the user to put right, 3 a limit passed, 130 interrupted."""
    try:
        sys.exit(cli.main(standalone_mode=False) or 0)
    except click.ClickException as error:
        click.echo(f"error: {error.format_message()}", err=True)
        sys.exit(2)
    except PlansmithError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(error.exit_code)
    except OSError as error:  # of the machine, not of ours: a full disk, a closed pipe, no permission
        click.echo(f"error: {error.filename or 'input or output'}: {error.strerror or error}", err=True)
        sys.exit(2)
    except (click.Abort, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        sys.exit(130)


if __name__ == "__main__":
    main()
