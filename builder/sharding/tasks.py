"""The work of one rank, and what became of it, in plain data that any process or machine can be given."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

Progress = Callable[[int, int, int, str], None]
"""Called with a rank, its weights done, its weights in all and the name of the weight that is being added."""

Besides = Callable[[], Mapping[str, Any]]
"""What the files of all ranks depend on besides their tasks, in JSON; it may take a while to be known."""


@dataclass(frozen=True, kw_only=True)
class RankTask:
    """``function``, "package.module:name", is called as ``function(arguments, output, on_weight)`` in its own process.

    It writes the rank's files into the empty directory ``output``, tells ``on_weight(done, total, name)``, and returns
    its report. Arguments and report are JSON.
    """

    rank: int
    function: str
    arguments: Mapping[str, Any]
    memory_bytes: int  # resident at most, as estimated

    def key(self, besides: Mapping[str, Any]) -> str:
        """Names what the files depend on: this task, and what is ``besides`` it."""
        data = json.dumps([self.rank, self.function, {**self.arguments, **besides}], sort_keys=True)
        return hashlib.blake2b(data.encode(), digest_size=16).hexdigest()


@dataclass(frozen=True, kw_only=True)
class RankResult:
    rank: int
    report: Mapping[str, Any]  # what the function returned
    seconds: float
    peak_rss_bytes: int | None  # of its process; None where the system does not tell
    reused: bool = False  # built by an earlier run


@dataclass(frozen=True, kw_only=True)
class RankFailure:
    rank: int
    kind: Literal["refused", "killed", "bug"]  # refused: the user can put it right
    message: str  # one line; of a bug, the stack trace


Outcome = RankResult | RankFailure
OnOutcome = Callable[[Outcome], None]
