"""When the tokens of a batch of requests arrived, and what that makes: one measure for all contenders."""

from __future__ import annotations

import itertools
from statistics import median
from time import perf_counter
from typing import Any


class Timeline:
    """Made at the moment the requests are submitted. Times are seconds since then."""

    def __init__(self, num_requests: int) -> None:
        self._started = perf_counter()
        self._arrivals: list[list[tuple[float, int]]] = [[] for _ in range(num_requests)]

    def now(self) -> float:
        return perf_counter() - self._started

    def add(self, request: int, now: float, num_tokens: int) -> None:
        """``request`` has ``num_tokens`` output tokens in all at ``now``; a message that brings none is left out."""
        events = self._arrivals[request]
        if num_tokens > (events[-1][1] if events else 0):
            events.append((now, num_tokens))

    def summary(self) -> dict[str, Any]:
        """Rates in tokens per second, times in seconds.

        ``decode_rate`` counts only while all requests decode: from the last first token to the first last one. It is
        the sum of the requests' own rates, so it does not matter where in a step the window begins. ``itl`` is the
        median over all tokens of the time since the message before, shared among the tokens of the message.
        """
        arrivals = self._arrivals
        all_started = max(events[0][0] for events in arrivals)
        first_ended = min(events[-1][0] for events in arrivals)
        rates = []
        for events in arrivals:
            window = [event for event in events if all_started <= event[0] <= first_ended]
            if len(window) > 1:
                rates.append((window[-1][1] - window[0][1]) / (window[-1][0] - window[0][0]))
        num_tokens = sum(events[-1][1] for events in arrivals)
        seconds = max(events[-1][0] for events in arrivals)
        return {
            "num_tokens": num_tokens,
            "seconds": seconds,
            "rate": num_tokens / seconds,
            "decode_rate": sum(rates) if len(rates) == len(arrivals) else None,
            "prefill_seconds": all_started,
            "ttft": median(events[0][0] for events in arrivals),
            "itl": _inter_token_latency(arrivals),
        }


def _inter_token_latency(arrivals: list[list[tuple[float, int]]]) -> float | None:
    gaps = []
    for events in arrivals:
        for (before, had), (now, has) in itertools.pairwise(events):
            gaps += [(now - before) / (has - had)] * (has - had)
    return median(gaps) if gaps else None
