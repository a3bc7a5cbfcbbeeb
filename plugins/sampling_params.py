"""Sampling parameters out of a client's JSON object, checked name by name."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from typing import Any

from plansmith_errors import RequestError
from plugins.generation import SamplingParams

MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 512
_MAX_SEED = 2**63 - 1


def parse_sampling_params(values: Mapping[str, object]) -> SamplingParams:
    """Read a client's JSON object; null means the default.

    Raises RequestError with the value found and what is allowed: an unknown name, a wrong type, a value out of range.
    """
    if not isinstance(values, Mapping):
        raise RequestError(f"sampling parameters are {_show(values)}: expected an object of names and values")
    parsed: dict[str, Any] = {}
    for name, value in values.items():
        parse = _PARSERS.get(name)
        if parse is None:
            raise RequestError(_unknown(name))
        if value is not None:
            parsed[name] = parse(name, value)
    return SamplingParams(**parsed)


def _integer(low: int, high: int | None = None) -> Callable[[str, object], int]:
    allowed = f"an integer of at least {low}" if high is None else f"an integer from {low} to {high}"

    def parse(name: str, value: object) -> int:
        # bool is a subclass of int, but "max_tokens": true is a client's mistake.
        if not isinstance(value, int) or isinstance(value, bool) or value < low or (high is not None and value > high):
            raise _refusal(name, value, allowed)
        return value

    return parse


def _number(allowed: str, is_allowed: Callable[[float], bool]) -> Callable[[str, object], float]:
    def parse(name: str, value: object) -> float:
        # NaN and the infinities fail the range check, as every comparison with them does.
        if not isinstance(value, int | float) or isinstance(value, bool) or not is_allowed(value):
            raise _refusal(name, value, allowed)
        return float(value)

    return parse


def _boolean(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise _refusal(name, value, "true or false")
    return value


def _stop_strings(name: str, value: object) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list | tuple) or len(stops) > MAX_STOP_STRINGS:
        raise _refusal(name, value, f"a string or a list of at most {MAX_STOP_STRINGS} strings")
    for stop in stops:
        if not isinstance(stop, str) or not 1 <= len(stop) <= MAX_STOP_LENGTH:
            raise _refusal(name, stop, f"strings of 1 to {MAX_STOP_LENGTH} characters")
    return tuple(stops)


_PARSERS: dict[str, Callable[[str, object], object]] = {
    "max_tokens": _integer(1),
    "temperature": _number("a number from 0 to 100", lambda value: 0 <= value <= 100),
    "top_k": _integer(0),
    "top_p": _number("a number above 0 and at most 1", lambda value: 0 < value <= 1),
    "seed": _integer(0, _MAX_SEED),
    "stop": _stop_strings,
    "ignore_eos": _boolean,
    "logprobs": _integer(0, MAX_LOGPROBS),
}


def _refusal(name: str, value: object, allowed: str) -> RequestError:
    return RequestError(f"{name} is {_show(value)}: allowed is {allowed}")


def _unknown(name: object) -> str:
    near = difflib.get_close_matches(str(name)[:64], _PARSERS, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}?" if near else f"known names: {', '.join(_PARSERS)}"
    return f"unknown sampling parameter {_show(name)}; {hint}"


def _show(value: object) -> str:
    """The value on one line, cut short: it comes from outside and may be megabytes."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an integer of more than 4300 digits, lists within lists
        return f"a {type(value).__name__} too large to show"
    return text if len(text) <= 80 else f"{text[:77]}..."
