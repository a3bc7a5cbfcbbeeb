"""Streamed text is the whole text: no half characters, no lost spaces, no piece of a stop string."""

from __future__ import annotations

import itertools

from hypothesis import example, given, settings
from hypothesis import strategies as st

from plugins.inflight_batching.detokenizer import IncrementalDetokenizer, TextStream, special_token_ids
from plugins.inflight_batching.stop_matcher import StopMatcher

BYTE_EOS = 256


def stream(tokenizer, token_ids):
    detokenizer = IncrementalDetokenizer(tokenizer, special_token_ids(tokenizer))
    pieces = [detokenizer.add(token_id) for token_id in token_ids]
    return pieces, detokenizer.flush()


@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=30))
@example(text="naïve 日本語 👩‍👩‍👧 \ufffd end")
def test_byte_level_text_arrives_in_whole_characters(byte_tokenizer, text):
    token_ids = byte_tokenizer.encode(text, add_special_tokens=False).ids
    pieces, rest = stream(byte_tokenizer, token_ids)
    assert "".join(pieces) + rest == byte_tokenizer.decode(token_ids) == text
    if "\ufffd" not in text:
        assert "\ufffd" not in "".join(pieces)
        assert rest == ""


@settings(max_examples=200, deadline=None)
@given(token_ids=st.lists(st.integers(0, BYTE_EOS), max_size=40))
def test_bytes_that_are_no_text_arrive_as_the_whole_would(byte_tokenizer, token_ids):
    pieces, rest = stream(byte_tokenizer, token_ids)
    assert "".join(pieces) + rest == byte_tokenizer.decode(token_ids, skip_special_tokens=True)


@settings(max_examples=200, deadline=None)
@given(
    parts=st.lists(
        st.sampled_from(["\u2581", "\u2581a", "\u2581the", "b", "c", "\u2581\u2581", "</s>"])
        | st.characters(codec="utf-8"),
        max_size=15,
    )
)
@example(parts=["\u2581a", "</s>", "\u2581the"])
@example(parts=["</s>", "\u2581", "\u2581a", "é", "日", "\u2581the"])
def test_byte_fallback_text_keeps_its_characters_and_spaces(fallback_tokenizer, parts):
    token_ids = []
    for part in parts:
        known = fallback_tokenizer.token_to_id(part)
        fallback = [
            fallback_tokenizer.token_to_id(f"<0x{byte:02X}>")
            for byte in part.encode(
                "utf-8",
            )
        ]
        token_ids += [known] if known is not None else fallback
    pieces, rest = stream(fallback_tokenizer, token_ids)
    whole = fallback_tokenizer.decode(token_ids, skip_special_tokens=True)
    assert "".join(pieces) + rest == whole
    if "\ufffd" not in whole:
        assert rest == ""


def test_broken_bytes_without_end_are_shown_in_time_and_do_not_pile_up(byte_tokenizer):
    continuation = byte_tokenizer.encode("é", add_special_tokens=False).ids[1]
    pieces, _ = stream(byte_tokenizer, [continuation] * 1000)
    assert sum(map(len, pieces)) > 900


def plain_stop(text, stops):
    """(shown text, stopped), deciding after each character."""
    for end in range(1, len(text) + 1):
        begins = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if begins:
            return text[: min(begins)], True
    return text, False


@settings(max_examples=400, deadline=None)
@given(
    pieces=st.lists(st.text(alphabet="ab", max_size=4), max_size=10),
    stops=st.lists(st.text(alphabet="ab", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_stop_strings_are_found_however_the_text_is_cut(pieces, stops):
    matcher = StopMatcher(stops)
    shown, stopped = "", False
    for piece in pieces:
        more, stopped = matcher.add(piece)
        shown += more
        if stopped:
            break
    assert (shown + matcher.flush(), stopped) == plain_stop("".join(pieces), stops)


def test_as_little_as_possible_is_held_back():
    matcher = StopMatcher(["\n\nUser:"])
    assert matcher.add("Hello\n") == ("Hello", False)
    assert matcher.add("wor") == ("\nwor", False)
    assert matcher.add("ld\n\nUse") == ("ld", False)
    assert matcher.add("r: hi") == ("", True)


def test_a_stop_string_across_tokens_and_characters_is_never_shown(byte_tokenizer):
    detokenizer = IncrementalDetokenizer(byte_tokenizer, special_token_ids(byte_tokenizer))
    text = TextStream(detokenizer, ["ö!"])
    token_ids = byte_tokenizer.encode("schön sö! mehr", add_special_tokens=False).ids
    shown = "".join(text.add(token_id) for token_id in itertools.takewhile(lambda _: not text.stopped, token_ids))
    assert (shown, text.stopped, text.finish()) == ("schön s", True, "")
