"""Text of a sequence that grows token by token: complete characters only, stop strings never shown."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer

from plugins.inflight_batching.stop_matcher import StopMatcher

_REPLACEMENT = "\ufffd"  # what decoders put in place of bytes that are no character, or not yet
_MAX_HELD_TOKENS = 64


def special_token_ids(tokenizer: Tokenizer) -> frozenset[int]:
    """Ids whose text is never shown."""
    return frozenset(token_id for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special)


class IncrementalDetokenizer:
    """Decodes a sequence as it grows; together the pieces are ``tokenizer.decode`` of the whole without special tokens.

    (Where a model emits bytes that are no text, a byte-fallback decoder takes back characters before them; a stream
    cannot, and shows them.)

    Each new token is decoded behind the tokens that gave the previous piece, because decoders treat a first token
    apart (they drop its leading space) and join bytes across tokens; what those tokens gave alone is then cut off.
    Special tokens are left out here and not by ``DecodeStream``: as the only context they would decode to nothing, and
    the space of the word behind them would be lost. ``decode`` keeps the interpreter lock and ``decode_batch``
    gives it up: beside busy threads, one batch call can cost a whole switch interval of 5 ms.

    ``lengths`` remembers how many characters each token gives alone; the detokenizers of one tokenizer may share it.
    """

    __slots__ = ("_decode", "_lengths", "_num_context", "_num_sent", "_special_ids", "_window")

    def __init__(
        self, tokenizer: Tokenizer, special_ids: frozenset[int], lengths: dict[int, int] | None = None
    ) -> None:
        self._decode = tokenizer.decode
        self._special_ids = special_ids
        self._lengths = {} if lengths is None else lengths
        self._window: list[int] = []  # the context, then tokens whose text is not out yet
        self._num_context = 0
        self._num_sent = 0  # characters of the window's text that are out: those of the context

    def add(self, token_id: int) -> str:
        """The complete characters that ``token_id`` brings, perhaps none."""
        if token_id in self._special_ids:
            return ""
        window = self._window
        window.append(token_id)
        text = self._decode(window, False)
        # A model that emits broken bytes without end must not make the window, and the cost of a token, grow with them.
        is_open = len(text) <= self._num_sent or text.endswith(_REPLACEMENT)
        if is_open and len(window) - self._num_context < _MAX_HELD_TOKENS:
            return ""
        piece = text[self._num_sent :]
        del window[: self._num_context]
        self._num_context = len(window)
        # The context is one token nearly always, and decoding it again was a third of the cost of a token.
        num_sent = self._lengths.get(token_id) if len(window) == 1 else None
        if num_sent is None:
            num_sent = len(self._decode(window, False))
            if len(window) == 1:
                self._lengths[token_id] = num_sent
        self._num_sent = num_sent
        return piece

    def flush(self) -> str:
        """The rest at the end of the sequence; bytes that never became a character appear as U+FFFD."""
        if len(self._window) == self._num_context:
            return ""
        piece = self._decode(self._window, False)[self._num_sent :]
        self._num_context, self._num_sent = len(self._window), self._num_sent + len(piece)
        return piece


class TextStream:
    """Detokenizer and stop strings of one sequence. ``stopped`` is set once a stop string is complete."""

    __slots__ = ("_detokenizer", "_matcher", "stopped")

    def __init__(self, detokenizer: IncrementalDetokenizer, stops: Sequence[str]) -> None:
        self._detokenizer = detokenizer
        self._matcher = StopMatcher(stops) if stops else None
        self.stopped = False

    def add(self, token_id: int) -> str:
        """Text that may be shown after ``token_id``."""
        piece = self._detokenizer.add(token_id)
        return self._match(piece) if self._matcher is not None and piece else piece

    def finish(self) -> str:
        """Text held back until now, at the end of the sequence; nothing after a stop string."""
        if self.stopped:
            return ""
        rest = self._match(self._detokenizer.flush())
        return rest if self._matcher is None or self.stopped else rest + self._matcher.flush()

    def _match(self, piece: str) -> str:
        if self._matcher is None:
            return piece
        shown, self.stopped = self._matcher.add(piece)
        return shown
