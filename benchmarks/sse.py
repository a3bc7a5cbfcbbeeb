"""A light client of many HTTP streams at once: one asyncio loop, bare sockets, server-sent events.

It shares the machine with the server that is measured, so it does as little as a client can.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import urlsplit

OnMessage = Callable[[int, dict[str, Any]], None]
"""Called with the number of the stream and one message."""


def stream_all(url: str, bodies: Sequence[dict[str, Any]], on_message: OnMessage) -> None:
    """POST every body to ``url`` at once and read the streams to their ends. Exits when one is refused."""
    requests = [_request(url, body) for body in bodies]
    asyncio.run(_stream_all(url, requests, on_message))


async def _stream_all(url: str, requests: list[bytes], on_message: OnMessage) -> None:
    await asyncio.gather(*(_stream(url, number, request, on_message) for number, request in enumerate(requests)))


async def _stream(url: str, number: int, request: bytes, on_message: OnMessage) -> None:
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    writer.write(request)
    status = await reader.readline()
    if b" 200 " not in status:
        sys.exit(f"{url}: {status.decode().strip()}: {(await reader.read()).decode(errors='replace')[-500:]}")
    async for line in reader:  # chunk sizes and headers are lines too, and none of them begins like an event
        if line.startswith(b"data: {"):
            on_message(number, json.loads(line[6:]))
    writer.close()


def _request(url: str, body: dict[str, Any]) -> bytes:
    parts = urlsplit(url)
    payload = json.dumps(body).encode()
    head = (
        f"POST {parts.path} HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(payload)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + payload
