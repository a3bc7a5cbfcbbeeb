"""The sampling settings of one request, from where Triton clients put them."""

from __future__ import annotations

import json
from typing import Any

from plansmith_errors import RequestError
from plugins.generation import SamplingParams


def parse_sampling(sampling_json: str, parameters_json: str) -> SamplingParams:
    """Join the ``sampling_parameters`` tensor and the request's own parameters (vLLM reads either) and validate them.

    Raises RequestError for broken JSON, a name given in both places, and whatever SamplingParams refuses.
    """
    sampling = _parse_object("sampling_parameters", sampling_json)
    parameters = _parse_object("request parameters", parameters_json)
    # Triton's own settings travel among the parameters under a reserved prefix
    parameters = {name: value for name, value in parameters.items() if not name.startswith("triton_")}
    both = sorted(sampling.keys() & parameters.keys())
    if both:
        raise RequestError(f"{both[0]!r} is given in sampling_parameters and as a request parameter; give it once")
    return SamplingParams.from_mapping({**sampling, **parameters})


def _parse_object(source: str, text: str) -> dict[str, Any]:
    if not text:
        return {}
    try:
        value = json.loads(text, object_pairs_hook=_unique_names)
    except (ValueError, RecursionError) as error:
        raise RequestError(
            f'{source} is not valid JSON: {error}; expected an object such as {{"max_tokens": 64}}'
        ) from None
    if not isinstance(value, dict):
        raise RequestError(
            f'{source} is a JSON {type(value).__name__}; expected an object such as {{"max_tokens": 64}}'
        )
    return value


def _unique_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = dict(pairs)
    if len(names) < len(pairs):
        raise ValueError("a name is given twice")
    return names
