"""Serve a repository in the foreground and say what happens, for ``serve`` and ``run --serve``."""

from __future__ import annotations

from pathlib import Path

import builder
from builder.compatibility import why_not_run
from plansmith.config import ServeSection
from plansmith.console import Console
from plansmith_errors import EngineError
from triton_repo import ServerReady, ServerStopped, ServerStopping, check_repository, serve


def serve_in_foreground(repository: Path, section: ServeSection, console: Console) -> None:
    """Return when Ctrl-C or SIGTERM has stopped the server.

    Raises ServeError, and EngineError before a server starts where this machine cannot run the engine.
    """
    _check_engine(repository)
    for event in serve(repository, **section.model_dump()):
        if isinstance(event, ServerReady):
            console.result(
                {
                    "state": "ready",
                    "model": event.model_name,
                    "http": event.http_url,
                    "grpc": event.grpc_address,
                    "metrics": event.metrics_url,
                    "pid": event.pid,
                    "seconds": round(event.seconds, 2),
                },
                _ready_text(event),
            )
        elif isinstance(event, ServerStopping):
            console.info(f"{event.signal_name}: finishing open streams; once more to stop at once")
        elif isinstance(event, ServerStopped):
            console.info("stopped" if event.drained else "stopped; open streams were cut")


def _check_engine(repository: Path) -> None:
    """Of GPU targets; the cpu target's engine process says what is wrong within seconds."""
    engine = check_repository(repository).engine
    manifest = builder.read_manifest(engine)
    reason = why_not_run(manifest) if manifest.gpu is not None else None
    if reason is not None:
        raise EngineError(f"{engine}: {reason}")


def _ready_text(event: ServerReady) -> str:
    model_url = f"{event.http_url}/v2/models/{event.model_name}"
    return "\n".join(
        [
            f"{event.model_name} is ready after {event.seconds:.1f} s",
            f"  HTTP     {model_url}/generate_stream",
            f"  gRPC     {event.grpc_address}",
            f"  metrics  {event.metrics_url}",
            "Ctrl-C stops it. Try:",
            f"""  curl -N {model_url}/generate_stream -d '{{"text_input": "Once upon a time", "stream": true}}'""",
        ]
    )
