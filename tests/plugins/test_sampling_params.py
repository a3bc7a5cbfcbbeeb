"""A client's sampling parameters are honoured or refused with one clear line, never bent."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plansmith_errors import RequestError
from plugins.generation import SamplingParams


def test_names_left_out_or_null_have_their_defaults():
    assert SamplingParams.from_mapping({}) == SamplingParams()
    assert SamplingParams.from_mapping({"seed": None, "stop": None, "logprobs": None}) == SamplingParams()


def test_all_parameters_are_read():
    values = json.loads(
        '{"max_tokens": 7, "temperature": 1, "top_k": 3, "top_p": 0.5, "seed": 9223372036854775807,'
        ' "stop": ["a", "b"], "ignore_eos": true, "logprobs": 0}'
    )
    assert SamplingParams.from_mapping(values) == SamplingParams(
        max_tokens=7, temperature=1.0, top_k=3, top_p=0.5, seed=2**63 - 1, stop=("a", "b"), ignore_eos=True, logprobs=0
    )
    assert SamplingParams.from_mapping({"stop": "END"}).stop == ("END",)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_tokens": 0}, "max_tokens is 0: allowed is an integer of at least 1"),
        ({"max_tokens": True}, "max_tokens is True"),
        ({"max_tokens": 5.0}, "max_tokens is 5.0"),
        ({"max_tokens": "5"}, "max_tokens is '5'"),
        ({"temperature": -0.1}, "temperature is -0.1: allowed is a number from 0 to 100"),
        ({"temperature": 101}, "temperature is 101"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"temperature": float("inf")}, "temperature is inf"),
        ({"temperature": False}, "temperature is False"),
        ({"temperature": 10**400}, "temperature is 1000"),
        ({"temperature": 10**5000}, "temperature is a int too large to show"),
        ({"top_k": -1}, "top_k is -1: allowed is an integer of at least 0"),
        ({"top_p": 0}, "top_p is 0: allowed is a number above 0 and at most 1"),
        ({"top_p": 1.01}, "top_p is 1.01"),
        ({"seed": -1}, "seed is -1"),
        ({"seed": 2**63}, "seed is 9223372036854775808: allowed is an integer from 0 to 9223372036854775807"),
        ({"stop": [""]}, "stop is '': allowed is strings of 1 to 512 characters"),
        ({"stop": ["x" * 513]}, "stop is 'xxx"),
        ({"stop": ["x"] * 17}, "a list of at most 16 strings"),
        ({"stop": [1]}, "stop is 1"),
        ({"stop": {"a": 1}}, "stop is {'a': 1}"),
        ({"ignore_eos": 1}, "ignore_eos is 1: allowed is true or false"),
        ({"logprobs": 21}, "logprobs is 21: allowed is an integer from 0 to 20"),
        ({"temprature": 1}, "unknown sampling parameter 'temprature'; did you mean 'temperature'?"),
        ({"zzz": 1}, "unknown sampling parameter 'zzz'; known names: max_tokens, "),
        (["max_tokens"], "expected an object"),
    ],
)
def test_a_bad_value_is_named_with_what_is_allowed(values, message):
    with pytest.raises(RequestError) as refusal:
        SamplingParams.from_mapping(values)
    assert message in str(refusal.value)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
names = st.sampled_from(["max_tokens", "temperature", "top_k", "top_p", "seed", "stop", "ignore_eos", "logprobs", "n"])


@settings(deadline=None)
@given(st.dictionaries(names, json_values, max_size=4))
def test_any_json_object_is_read_or_refused_on_one_short_line(values):
    try:
        params = SamplingParams.from_mapping(values)
    except RequestError as refusal:
        assert "\n" not in str(refusal)
        assert len(str(refusal)) < 300
    else:
        for name, value in values.items():
            if value is not None and name != "stop":
                assert getattr(params, name) == value
