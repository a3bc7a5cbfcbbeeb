from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from plansmith_errors import RequestError
from triton_repo.backend.triton_request import ParsedRequest, parse_request


def parse(**tensors: Any) -> ParsedRequest:
    """Parse a request of these input tensors; text as bytes in an object array, as Triton's stub gives it."""
    arrays = {
        name: value
        if isinstance(value, np.ndarray)
        else np.array([value], dtype=bool if value in (True, False) else object)
        for name, value in tensors.items()
    }
    return parse_request(arrays.get)


def test_the_prompt_precedes_the_text_unless_excluded_as_vllms_backend_does() -> None:
    assert parse(text_input=b"Hi").echo
    assert parse(text_input=b"Hi", exclude_input_in_output=False).echo
    assert not parse(text_input=b"Hi", exclude_input_in_output=True).echo
    assert not parse(text_input=b"Hi", stream=True).echo
    assert not parse(text_input=b"Hi", stream=True, exclude_input_in_output=True).echo


def test_what_cannot_be_honoured_is_refused() -> None:
    with pytest.raises(RequestError, match="not possible when streaming"):
        parse(text_input=b"Hi", stream=True, exclude_input_in_output=False)
    with pytest.raises(RequestError, match="not possible when the prompt is input_ids"):
        parse(input_ids=np.array([1], np.int32), exclude_input_in_output=False)


def test_a_prompt_may_be_token_ids() -> None:
    parsed = parse(input_ids=np.array([5, 6, 7], np.int32), text_input=b"")
    assert parsed.input_ids == [5, 6, 7]
    assert parsed.text is None
    assert not parsed.echo


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({}, "the prompt is empty"),
        ({"text_input": b""}, "the prompt is empty"),
        ({"text_input": b"", "input_ids": np.array([], np.int32)}, "the prompt is empty"),
        ({"text_input": b"a", "input_ids": np.array([1], np.int32)}, "both given"),
        ({"text_input": np.array([b"a", b"b"], object)}, "text_input has 2 elements, expected 1"),
        ({"text_input": b"ab\xff"}, "text_input is not UTF-8: byte 0xff at offset 2"),
        ({"text_input": b"a", "sampling_parameters": b"\xfe"}, "sampling_parameters is not UTF-8"),
    ],
)
def test_malformed_requests_are_explained(tensors: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        parse(**tensors)
