"""A small client of Triton's HTTP ``generate_stream``, on the standard library alone."""

from __future__ import annotations

import http.client
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlsplit

from plansmith_errors import RequestError, ServeError

_CODE = re.compile(r"\[([A-Z_]+)\] (.*)", re.DOTALL)
_MAX_LINE_BYTES = 64 << 20


@dataclass(frozen=True)
class Chunk:
    """One message of a stream; the last one has ``finish_reason``."""

    text: str
    num_input_tokens: int
    num_output_tokens: int  # tokens this message adds
    finish_reason: str | None = None
    logprobs: list[dict[str, Any]] | None = None


def stream_generate(
    url: str,
    model: str,
    prompt: str | Sequence[int],
    sampling: Mapping[str, object] | None = None,
    *,
    timeout: float = 600.0,
) -> Iterator[Chunk]:
    """Generate from a prompt, text or token ids [num_prompt_tokens]; yields as the server sends.

    Closing the iterator closes the connection, which cancels the request. ``timeout`` is the longest silence, in
    seconds. Raises RequestError when the request is refused or was cancelled, ServeError when the server cannot be
    reached, is too busy, or fails.
    """
    body = {**_prompt(prompt), "stream": True, "sampling_parameters": json.dumps(dict(sampling or {}))}
    connection = _connect(url, timeout)
    try:
        response = _post(connection, f"/v2/models/{quote(model, safe='')}/generate_stream", body, url)
        for message in _events(response):
            chunk = _chunk(message)
            yield chunk
            if chunk.finish_reason is not None:
                return
        raise ServeError(f"{url}: the stream ended before its last message; the server was stopped or has failed")
    except (OSError, http.client.HTTPException) as error:
        raise ServeError(f"{url}: {type(error).__name__} while streaming: {error}") from None
    finally:
        connection.close()


def generate(
    url: str,
    model: str,
    prompt: str | Sequence[int],
    sampling: Mapping[str, object] | None = None,
    *,
    timeout: float = 600.0,
) -> Chunk:
    """Generate without streaming: one chunk with the whole text, without the prompt. Raises as ``stream_generate``."""
    body = {**_prompt(prompt), "stream": False, "sampling_parameters": json.dumps(dict(sampling or {}))}
    if isinstance(prompt, str):
        body["exclude_input_in_output"] = True
    connection = _connect(url, timeout)
    try:
        response = _post(connection, f"/v2/models/{quote(model, safe='')}/generate", body, url)
        return _chunk(_json(response.read()))
    except (OSError, http.client.HTTPException) as error:
        raise ServeError(f"{url}: {type(error).__name__}: {error}") from None
    finally:
        connection.close()


def error_of(message: str) -> RequestError | ServeError:
    """The exception that a server's "[CODE] message" stands for."""
    match = _CODE.match(message)
    code, text = match.groups() if match else ("INTERNAL", message)
    return RequestError(text) if code in ("INVALID_ARGUMENT", "CANCELLED") else ServeError(text)


def _prompt(prompt: str | Sequence[int]) -> dict[str, Any]:
    return {"text_input": prompt} if isinstance(prompt, str) else {"input_ids": [int(token_id) for token_id in prompt]}


def _connect(url: str, timeout: float) -> http.client.HTTPConnection:
    parts = urlsplit(url)
    if parts.scheme != "http" or not parts.hostname:
        raise ServeError(f"{url}: expected an address such as http://127.0.0.1:8000")
    return http.client.HTTPConnection(parts.hostname, parts.port or 80, timeout=timeout)


def _post(
    connection: http.client.HTTPConnection, path: str, body: dict[str, Any], url: str
) -> http.client.HTTPResponse:
    try:
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
    except ConnectionRefusedError:
        raise ServeError(f"{url}: no server answers there; start one with plansmith serve") from None
    if response.status != http.client.OK:
        raise _refused(response, url)
    return response


def _refused(response: http.client.HTTPResponse, url: str) -> RequestError | ServeError:
    text = response.read().decode("utf-8", "replace")
    try:
        message = json.loads(text.removeprefix("data:"))["error"]  # generate_stream refuses in the form of an event
    except (ValueError, KeyError, TypeError):
        return ServeError(f"{url}: HTTP {response.status}: {text[:200] or response.reason}")
    if _CODE.match(message):
        return error_of(message)
    # Triton itself refused, before the model saw the request
    return ServeError(message) if response.status >= 500 else RequestError(message)


def _events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """Payloads of server-sent events (WHATWG HTML, section 9.2); Triton sends one ``data:`` line each."""
    while line := response.readline(_MAX_LINE_BYTES):
        if line.startswith(b"data:"):
            message = _json(line[5:])
            if "error" in message:
                raise error_of(str(message["error"]))
            yield message


def _json(payload: bytes) -> dict[str, Any]:
    try:
        message = json.loads(payload)
    except ValueError:
        raise ServeError(f"the server sent something that is not JSON: {payload[:100]!r}") from None
    if not isinstance(message, dict):
        raise ServeError(f"the server sent a JSON {type(message).__name__}, expected an object")
    return message


def _chunk(message: Mapping[str, Any]) -> Chunk:
    logprobs = message.get("logprobs")
    return Chunk(
        message["text_output"],
        message["num_input_tokens"],
        message["num_output_tokens"],
        message["finish_reason"] or None,
        json.loads(logprobs) if logprobs else None,
    )
