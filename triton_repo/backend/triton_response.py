"""Chunks as Triton responses. Only the Triton stub has the module that makes them, so it is passed in."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

import numpy as np

from triton_repo.backend.stream import Chunk

_CODE = re.compile(r"^\[([A-Z_]+)\] ")


class TritonResponses:
    """The response sender of one request. ``utils`` is the ``triton_python_backend_utils`` module."""

    def __init__(self, utils: Any, sender: Any, wanted: Collection[str]) -> None:
        self._utils = utils
        self._sender = sender
        self._wanted = wanted

    def send(self, chunk: Chunk) -> None:
        """Send one response, and with the last one the FINAL flag; blocks for a round trip to the server."""
        flags = self._utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if chunk.is_final else 0
        if chunk.error is not None:
            self._sender.send(self._utils.InferenceResponse(error=self._error(chunk.error)), flags=flags)
        else:
            self._sender.send(self._utils.InferenceResponse(self._tensors(chunk)), flags=flags)

    def is_cancelled(self) -> bool:
        """Whether the client has gone; a round trip to the server."""
        return bool(self._sender.is_cancelled())

    def _tensors(self, chunk: Chunk) -> list[Any]:
        tensors = {
            "text_output": _string(chunk.text),
            "finish_reason": _string(chunk.finish_reason or ""),
            "num_input_tokens": np.array([chunk.num_input_tokens], np.int32),
            "num_output_tokens": np.array([chunk.num_output_tokens], np.int32),
        }
        if chunk.logprobs is not None:
            tensors["logprobs"] = _string(chunk.logprobs)
        return [self._utils.Tensor(name, value) for name, value in tensors.items() if name in self._wanted]

    def _error(self, message: str) -> Any:
        """A TritonError whose own code fits the one in the message (gRPC clients see it; HTTP answers 400 to all)."""
        codes = self._utils.TritonError
        known = {
            "INVALID_ARGUMENT": codes.INVALID_ARG,
            "UNAVAILABLE": codes.UNAVAILABLE,
            "CANCELLED": codes.CANCELLED,
            "INTERNAL": codes.INTERNAL,
        }
        match = _CODE.match(message)
        return codes(message, known[match.group(1)] if match else codes.INTERNAL)


def _string(text: str) -> Any:
    # a lone surrogate, which JSON can carry, is not encodable; it becomes a question mark
    return np.array([text.encode("utf-8", "replace")], dtype=object)
