"""Ports of a server: checked before it starts, because Triton reports a taken one late and deep in its log."""

from __future__ import annotations

import errno
import socket
from dataclasses import dataclass

from plansmith_errors import ServeError


@dataclass(frozen=True)
class Ports:
    http: int
    grpc: int
    metrics: int


def reserve_ports(host: str, http_port: int, grpc_port: int, metrics_port: int) -> Ports:
    """Check the ports, and choose a free one wherever 0 is asked for. Raises ServeError naming port and setting."""
    wanted = {"http": http_port, "grpc": grpc_port, "metrics": metrics_port}
    _refuse_twins(wanted)
    open_sockets: list[socket.socket] = []
    found: dict[str, int] = {}
    try:
        # all are held until the last is found, so that two zeros do not get the same one; named ports come first
        for kind, port in sorted(wanted.items(), key=lambda item: item[1] == 0):
            listener = _bind(host, port, kind)
            open_sockets.append(listener)
            found[kind] = listener.getsockname()[1]
    finally:
        for listener in open_sockets:
            listener.close()
    return Ports(**found)


def _bind(host: str, port: int, kind: str) -> socket.socket:
    if not 0 <= port <= 65535:
        raise ServeError(f"serve.{kind}_port is {port}; expected 0 (any free port) to 65535")
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ServeError(f"serve.host is {host!r}: {error.strerror}") from None
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of a former server do not count
        listener.bind(address)
        listener.listen(1)  # two sockets may share a bound address, but only one may listen
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise ServeError(
                f"port {port} on {host} is taken; stop what uses it or set serve.{kind}_port (0: any free one)"
            ) from None
        raise ServeError(
            f"port {port} on {host} cannot be used: {error.strerror}; set serve.{kind}_port or serve.host to another"
        ) from None
    return listener


def _refuse_twins(wanted: dict[str, int]) -> None:
    seen: dict[int, str] = {}
    for kind, port in wanted.items():
        if port and port in seen:
            raise ServeError(
                f"port {port} is given for serve.{seen[port]}_port and serve.{kind}_port; choose different ones"
            )
        seen[port] = kind
