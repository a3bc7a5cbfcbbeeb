"""From an engine to a service: model repository, Triton's Python backend, server, client, chat templates."""

from triton_repo.chat_template import render_chat, render_chat_with
from triton_repo.client import Chunk, generate, stream_generate
from triton_repo.options import PackageOptions
from triton_repo.repository import Repository, check_repository, write_repository
from triton_repo.server.serving import ServeEvent, ServerReady, ServerStopped, ServerStopping, serve
from triton_repo.server.triton_server import TritonServer

__all__ = [
    "Chunk",
    "PackageOptions",
    "Repository",
    "ServeEvent",
    "ServerReady",
    "ServerStopped",
    "ServerStopping",
    "TritonServer",
    "check_repository",
    "generate",
    "render_chat",
    "render_chat_with",
    "serve",
    "stream_generate",
    "write_repository",
]
