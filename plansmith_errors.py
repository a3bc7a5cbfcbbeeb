"""The one exception tree. It stands below every package, so that each can raise and the command can catch.

A message is one line: what was found, what was expected, what to do. The command prints it, exits with ``exit_code``;
any other exception that reaches the command is a bug of ours and keeps its stack trace.
"""

from __future__ import annotations


class PlansmithError(Exception):
    """Something the user can put right."""

    exit_code = 2


class ConfigError(PlansmithError):
    """A build file, a recipe or a command-line setting is wrong."""


class CheckpointError(PlansmithError):
    """A source or quantized checkpoint is missing, truncated, tampered with or of an unknown kind."""


class QuantizeError(PlansmithError):
    """A recipe cannot be applied to this checkpoint."""


class BuildError(PlansmithError):
    """A checkpoint cannot be compiled for the target that was asked for."""


class EngineError(PlansmithError):
    """An engine directory does not fit this machine or library, or an engine failed while it ran."""


class RequestError(PlansmithError):
    """A generation request is refused; the server stays up."""


class RepositoryError(PlansmithError):
    """A Triton model repository cannot be written or read."""


class ServeError(PlansmithError):
    """A server cannot be found, started or reached."""


class ArtifactError(PlansmithError):
    """The artifact store is locked, damaged or not writable."""


class ExportError(PlansmithError):
    """A checkpoint cannot be written in the layout, or for the run-time, that was asked for."""
