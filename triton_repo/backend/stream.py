"""One open request as the stub sees it: what was generated and not yet sent."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from triton_repo.backend.protocol import Delta


@dataclass(frozen=True)
class Chunk:
    """One response: the text gathered since the last one, or the error that ends the request."""

    text: str
    num_input_tokens: int
    num_output_tokens: int  # tokens this chunk adds
    finish_reason: str | None = None
    logprobs: str | None = None  # JSON array, one object per token
    error: str | None = None  # "[CODE] message"

    @property
    def is_final(self) -> bool:
        return self.finish_reason is not None or self.error is not None


class ResponseSink(Protocol):
    """Where a request's responses go. Each call is a blocking round trip to the server."""

    def send(self, chunk: Chunk) -> None: ...

    def is_cancelled(self) -> bool: ...


@dataclass(eq=False)
class Stream:
    """Guarded by the lock of the sender that owns it."""

    request_id: int
    sink: ResponseSink
    is_streaming: bool
    prefix: str = ""  # the prompt, when the client wants it before the text
    last_sent: float | None = None
    due: float | None = None  # when the sender will look at it next; None: nothing is planned
    last_cancel_check: float = 0.0
    cancel_requested: bool = False
    _texts: list[str] = field(default_factory=list)
    _logprobs: list[str] = field(default_factory=list)
    _num_prompt_tokens: int = 0
    _num_output_tokens: int = 0
    _num_sent_tokens: int = 0
    _finish_reason: str | None = None
    _error: str | None = None

    @property
    def is_finished(self) -> bool:
        return self._finish_reason is not None or self._error is not None

    @property
    def has_output(self) -> bool:
        """Whether there is something the client should be sent now."""
        return self.is_finished or (self.is_streaming and bool(self._texts or self._logprobs))

    def add(self, delta: Delta) -> None:
        """Take what a step added."""
        if self.is_finished:
            return
        if delta.text:
            self._texts.append(delta.text)
        if delta.logprobs:
            self._logprobs += delta.logprobs
        self._num_prompt_tokens = delta.num_prompt_tokens
        self._num_output_tokens = delta.num_output_tokens
        if delta.finish_reason == "cancelled":
            self._error = "[CANCELLED] the request was cancelled"
        elif delta.finish_reason == "error":
            self._error = f"[INTERNAL] {delta.error or 'the engine failed on this request'}"
        else:
            self._finish_reason = delta.finish_reason

    def fail(self, error: str) -> None:
        """End with "[CODE] message"; text that was not sent yet is dropped."""
        if not self.is_finished:
            self._error = error

    def take(self) -> Chunk:
        """All that was gathered, as one response."""
        text = self.prefix + "".join(self._texts)
        logprobs = f"[{','.join(self._logprobs)}]" if self._logprobs else None
        num_tokens = self._num_output_tokens - self._num_sent_tokens
        self.prefix, self._texts, self._logprobs = "", [], []
        self._num_sent_tokens = self._num_output_tokens
        return Chunk(text, self._num_prompt_tokens, num_tokens, self._finish_reason, logprobs, self._error)
