"""Messages between the leading rank and the processes of the others: msgpack over a socket pair, never pickled.

The leader says Join, Allocate, Step ...; a rank answers each with Joined, Ready, Done, or with Failed.
"""

from __future__ import annotations

from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from builder.targets.tensorrt.runtime.gpu import Mode


class Join(msgspec.Struct, frozen=True, array_like=True, tag="join"):
    unique_id: bytes


class Allocate(msgspec.Struct, frozen=True, array_like=True, tag="allocate"):
    num_blocks: int


class Array(msgspec.Struct, frozen=True, array_like=True):
    dtype: str
    shape: tuple[int, ...]
    data: bytes


class Step(msgspec.Struct, frozen=True, array_like=True, tag="step"):
    mode: Mode
    feeds: dict[str, Array]


class Loaded(msgspec.Struct, frozen=True, array_like=True, tag="loaded"):
    """The plans are on the GPU; what follows decides the number of KV blocks, which all ranks share."""

    free_bytes: int
    bytes_per_block: int
    max_blocks: int


class Ready(msgspec.Struct, frozen=True, array_like=True, tag="ready"):
    pass


class Done(msgspec.Struct, frozen=True, array_like=True, tag="done"):
    pass


class Failed(msgspec.Struct, frozen=True, array_like=True, tag="failed"):
    message: str


Command = Join | Allocate | Step
Answer = Loaded | Ready | Done | Failed

_encoder = msgspec.msgpack.Encoder()
_commands: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)
_answers: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)


def encode(message: Command | Answer) -> bytes:
    """Encoded once, sent to every rank."""
    return _encoder.encode(message)


def step_message(mode: Mode, feeds: Mapping[str, npt.NDArray[Any]]) -> Step:
    return Step(mode, {name: Array(a.dtype.str, a.shape, a.tobytes()) for name, a in feeds.items()})


def read_feeds(step: Step) -> dict[str, npt.NDArray[Any]]:
    """Read-only arrays over the message."""
    return {name: np.frombuffer(a.data, a.dtype).reshape(a.shape) for name, a in step.feeds.items()}


def receive_command(connection: Connection) -> Command:
    """Raises EOFError when the leader is gone."""
    return _commands.decode(connection.recv_bytes())


def receive_answer(connection: Connection) -> Answer:
    """Raises EOFError when the rank is gone."""
    return _answers.decode(connection.recv_bytes())
