"""When to send what a stream has gathered: at once when little is sent, several tokens together when much is.

A message through Triton costs 0.2 to 0.6 ms of CPU whatever it holds, and on a CPU target the engine needs the same
cores. So the total rate of messages is bounded, and with it the delay of any one token.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Pacing:
    """Times are seconds of a monotonic clock."""

    max_messages_per_second: float = 100.0  # over all streams
    max_delay: float = 0.15  # the longest a token waits for others of its stream
    min_cancel_interval: float = 0.1
    max_cancel_checks_per_second: float = 25.0

    def interval(self, num_streams: int) -> float:
        """The least time between two messages of one stream while ``num_streams`` are open."""
        return min(self.max_delay, num_streams / self.max_messages_per_second)

    def due(self, now: float, last_sent: float | None, num_streams: int, *, is_final: bool = False) -> float:
        """When text that is ready now should be sent. First tokens and ends never wait."""
        if last_sent is None or is_final:
            return now
        return max(now, min(last_sent + self.interval(num_streams), now + self.max_delay))

    def cancel_interval(self, num_streams: int) -> float:
        """The time between two looks at whether one stream's client is gone. A look is a round trip to the server."""
        return max(self.min_cancel_interval, num_streams / self.max_cancel_checks_per_second)
