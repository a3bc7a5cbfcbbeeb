from __future__ import annotations

import io
import os
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plansmith_errors import EngineError
from triton_repo.backend.protocol import (
    MAX_FRAME_BYTES,
    Cancel,
    Command,
    Delta,
    Event,
    MessageReader,
    MessageWriter,
    Outputs,
    Submit,
)

deltas = st.builds(
    Delta,
    st.integers(0, 2**40),
    st.text(st.characters(exclude_categories=["Cs"])),
    st.integers(0, 2**20),
    st.integers(0, 2**20),
    st.sampled_from([None, "stop", "length", "cancelled", "error"]),
)


def frames_of(*messages: Command | Event) -> bytes:
    class Pipe(io.BytesIO):
        def close(self) -> None:
            pass

    pipe = Pipe()
    writer = MessageWriter(pipe)
    for message in messages:
        writer.send(message)
    return pipe.getvalue()


@given(st.lists(st.lists(deltas, max_size=4), max_size=4))
def test_outputs_come_back_as_they_were_sent(steps: list[list[Delta]]) -> None:
    sent = [Outputs(step) for step in steps]
    reader: MessageReader[Event] = MessageReader(io.BytesIO(frames_of(*sent)), Event)
    assert list(reader) == sent


def test_commands_and_events_keep_their_kind() -> None:
    sent = [Submit(1, "hi", None, "{}", ""), Cancel(1)]
    reader: MessageReader[Command] = MessageReader(io.BytesIO(frames_of(*sent)), Command)
    assert list(reader) == sent


@given(st.integers(0, 200))
def test_a_frame_cut_short_by_a_death_is_an_end(cut: int) -> None:
    whole = frames_of(Outputs([Delta(1, "x" * 50, 1, 1)]), Outputs([Delta(1, "y" * 50, 1, 2)]))
    reader: MessageReader[Event] = MessageReader(io.BytesIO(whole[: min(cut, len(whole) - 1)]), Event)
    assert len(list(reader)) < 2


def test_a_length_that_cannot_be_is_refused_before_memory_is_taken() -> None:
    reader: MessageReader[Event] = MessageReader(io.BytesIO(b"\xff\xff\xff\xff"), Event)
    with pytest.raises(EngineError, match=f"at most {MAX_FRAME_BYTES}"):
        list(reader)


def test_a_message_of_another_kind_is_refused() -> None:
    reader: MessageReader[Event] = MessageReader(io.BytesIO(frames_of(Cancel(1))), Event)
    with pytest.raises(EngineError, match="does not fit the protocol"):
        list(reader)


def test_a_message_larger_than_the_pipe_arrives_whole() -> None:
    read_end, write_end = os.pipe()
    message = Submit(1, "x" * 3_000_000, None, "", "")
    writer = MessageWriter(open(write_end, "wb", buffering=0))  # noqa: SIM115, PTH123
    thread = threading.Thread(target=lambda: (writer.send(message), writer.close()))
    thread.start()
    with open(read_end, "rb") as pipe:  # noqa: PTH123
        reader: MessageReader[Command] = MessageReader(pipe, Command)
        assert list(reader) == [message]
    thread.join()
