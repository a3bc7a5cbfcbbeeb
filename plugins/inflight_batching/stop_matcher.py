"""Stop strings over a text that arrives in pieces of any size."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Shows text up to the stop string that is complete first; of two complete at once, the one that begins first.

    This rule does not depend on how the text is cut into pieces. The longest end of the text that may still become a
    stop string is held back, so that no character of a stop string is ever shown.
    """

    __slots__ = ("_held", "_stops")

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""

    def add(self, piece: str) -> tuple[str, bool]:
        """(text that may be shown, whether a stop string is complete)."""
        text = self._held + piece
        found = [(begin + len(stop), begin) for stop in self._stops if (begin := text.find(stop)) >= 0]
        if found:
            self._held = ""
            return text[: min(found)[1]], True
        num_held = max((_overlap(text, stop) for stop in self._stops), default=0)
        shown = len(text) - num_held
        self._held = text[shown:]
        return text[:shown], False

    def flush(self) -> str:
        """The text held back, once no more can come."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that begins ``stop`` and is not all of it."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
