"""Messages between the Triton stub and the engine process: msgpack of typed structs, each behind its length.

A frame is a little-endian uint32, the number of bytes that follow, and one msgpack value. Nothing is ever pickled.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Iterator
from typing import Any, BinaryIO, Generic, TypeVar

import msgspec

from plansmith_errors import EngineError

Message = TypeVar("Message")

MAX_FRAME_BYTES = 256 << 20
_LENGTH = struct.Struct("<I")


class Submit(msgspec.Struct, frozen=True, array_like=True, tag="submit"):
    """A new request. Exactly one of ``text`` and ``input_ids`` is set; both JSON fields are as the client sent them."""

    request_id: int
    text: str | None
    input_ids: list[int] | None
    sampling_json: str
    parameters_json: str


class Cancel(msgspec.Struct, frozen=True, array_like=True, tag="cancel"):
    request_id: int


class QueryStats(msgspec.Struct, frozen=True, array_like=True, tag="stats"):
    pass


Command = Submit | Cancel | QueryStats


class Ready(msgspec.Struct, frozen=True, array_like=True, tag="ready"):
    """The engine is loaded and takes requests."""

    max_batch_size: int
    max_seq_len: int
    vocab_size: int
    max_prompt_bytes: int  # of UTF-8: no longer text can have at most max_seq_len tokens


class LoadFailed(msgspec.Struct, frozen=True, array_like=True, tag="load_failed"):
    message: str


class Delta(msgspec.Struct, frozen=True, array_like=True):
    """What was added to one request. ``num_output_tokens`` counts from its start, so empty deltas can be skipped."""

    request_id: int
    text: str
    num_prompt_tokens: int
    num_output_tokens: int
    finish_reason: str | None = None
    logprobs: list[str] | None = None  # one JSON object per token
    error: str | None = None


class Outputs(msgspec.Struct, frozen=True, array_like=True, tag="outputs"):
    """All that one engine step produced."""

    deltas: list[Delta]


class Refused(msgspec.Struct, frozen=True, array_like=True, tag="refused"):
    request_id: int
    code: str
    message: str


class Stats(msgspec.Struct, frozen=True, array_like=True, tag="stats_reply"):
    """``plugins.generation.GeneratorStats``, field by field."""

    num_running: int
    num_waiting: int
    num_blocks: int
    num_free_blocks: int
    num_steps: int
    num_prompt_tokens: int
    num_output_tokens: int
    num_preemptions: int


Event = Ready | LoadFailed | Outputs | Refused | Stats


class MessageWriter:
    """Writes frames to an unbuffered pipe; safe to use from several threads."""

    def __init__(self, pipe: BinaryIO) -> None:
        self._pipe = pipe
        self._encoder = msgspec.msgpack.Encoder()
        self._lock = threading.Lock()

    def send(self, message: Command | Event) -> None:
        """Write one message. Raises OSError when the other side is gone."""
        payload = self._encoder.encode(message)
        frame = memoryview(_LENGTH.pack(len(payload)) + payload)
        with self._lock:
            while frame:  # a raw pipe may take a part of a large frame
                frame = frame[self._pipe.write(frame) :]

    def close(self) -> None:
        with self._lock:
            self._pipe.close()


class MessageReader(Generic[Message]):
    """Iterates over the messages of a buffered pipe until the other side closes it."""

    def __init__(self, pipe: BinaryIO, message_type: Any) -> None:  # a union is no type[Message] to the type checker
        self._pipe = pipe
        self._decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(message_type)

    def __iter__(self) -> Iterator[Message]:
        """Raises EngineError when a frame is not what the protocol says; a frame cut short by a death is an end."""
        while len(header := self._pipe.read(_LENGTH.size)) == _LENGTH.size:
            (length,) = _LENGTH.unpack(header)
            if length > MAX_FRAME_BYTES:
                raise EngineError(f"engine pipe: frame of {length} bytes, at most {MAX_FRAME_BYTES} are allowed")
            payload = self._pipe.read(length)
            if len(payload) < length:
                return
            try:
                yield self._decoder.decode(payload)
            except msgspec.DecodeError as error:
                raise EngineError(f"engine pipe: a message does not fit the protocol: {error}") from None
