"""Reads one Triton request: tensors to a prompt and settings. Knows nothing of Triton but the shape of its tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from plansmith_errors import RequestError

ReadTensor = Callable[[str], npt.NDArray[Any] | None]
"""The input tensor of a name as an array (strings: bytes objects), or None when the client did not send it."""


@dataclass(frozen=True)
class ParsedRequest:
    """Exactly one of ``text`` and ``input_ids`` is set."""

    text: str | None
    input_ids: list[int] | None
    is_streaming: bool
    echo: bool  # the prompt comes before the text
    sampling_json: str


def parse_request(read: ReadTensor) -> ParsedRequest:
    """Validate the form of a request; what it asks for is judged by the engine. Raises RequestError.

    The defaults are those of Triton's vLLM backend: ``exclude_input_in_output`` is true while streaming and false
    otherwise; ``exclude_input_in_output=false`` while streaming is refused.
    """
    text = _string(read, "text_input")
    input_ids = _token_ids(read("input_ids"))
    if text and input_ids:
        raise RequestError("text_input and input_ids are both given; give one of them")
    if not text and not input_ids:
        raise RequestError("the prompt is empty; give text_input or input_ids")
    is_streaming = _bool(read, "stream") or False
    exclude = _bool(read, "exclude_input_in_output")
    if exclude is False and (is_streaming or input_ids):
        what = "streaming" if is_streaming else "the prompt is input_ids"
        raise RequestError(f"exclude_input_in_output is false, which is not possible when {what}; leave it out")
    echo = not is_streaming and not input_ids and not exclude
    sampling_json = _string(read, "sampling_parameters")
    return ParsedRequest(text or None, input_ids or None, is_streaming, echo, sampling_json)


def _one(read: ReadTensor, name: str) -> Any:
    array = read(name)
    if array is None:
        return None
    if array.size != 1:
        raise RequestError(f"{name} has {array.size} elements, expected 1")
    return array.reshape(-1)[0]


def _string(read: ReadTensor, name: str) -> str:
    value = _one(read, name)
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    try:
        return bytes(value).decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(
            f"{name} is not UTF-8: byte 0x{error.object[error.start]:02x} at offset {error.start}; send UTF-8 text"
        ) from None


def _bool(read: ReadTensor, name: str) -> bool | None:
    value = _one(read, name)
    return None if value is None else bool(value)


def _token_ids(array: npt.NDArray[Any] | None) -> list[int]:
    if array is None:
        return []
    ids: list[int] = array.reshape(-1).astype(np.int64).tolist()
    return ids
