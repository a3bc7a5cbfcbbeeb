from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from triton_repo.backend.pacing import Pacing

times = st.floats(0, 1e6)
stream_counts = st.integers(1, 10_000)


def test_a_first_token_is_sent_at_once_however_many_streams_there_are() -> None:
    assert Pacing().due(now=5.0, last_sent=None, num_streams=1000) == 5.0


def test_the_end_of_a_stream_never_waits() -> None:
    assert Pacing().due(now=5.0, last_sent=4.999, num_streams=1000, is_final=True) == 5.0


def test_one_stream_gets_every_token_as_it_comes() -> None:
    step = 0.010
    assert Pacing().due(now=5.0, last_sent=5.0 - step, num_streams=1) == 5.0


def test_many_streams_share_the_message_rate() -> None:
    pacing = Pacing(max_messages_per_second=200, max_delay=1.0)
    assert pacing.interval(20) == 0.1
    assert pacing.due(now=5.0, last_sent=4.95, num_streams=20) == 5.05


@given(now=times, since=st.floats(0, 100), num_streams=stream_counts)
def test_no_token_waits_longer_than_the_bound(now: float, since: float, num_streams: int) -> None:
    pacing = Pacing()
    due = pacing.due(now, now - since, num_streams)
    assert now <= due <= now + pacing.max_delay


@given(now=times, since=st.floats(0, 1), num_streams=stream_counts)
def test_more_streams_never_make_a_token_due_earlier(now: float, since: float, num_streams: int) -> None:
    pacing = Pacing()
    assert pacing.due(now, now - since, num_streams) <= pacing.due(now, now - since, num_streams + 1)


@given(num_streams=stream_counts)
def test_looking_for_lost_clients_has_a_bounded_cost(num_streams: int) -> None:
    pacing = Pacing()
    assert num_streams / pacing.cancel_interval(num_streams) <= pacing.max_cancel_checks_per_second + 1e-6 or (
        pacing.cancel_interval(num_streams) == pacing.min_cancel_interval
    )
