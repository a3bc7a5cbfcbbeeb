"""Where a run that was stopped left off, and whether this one may go on from there."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quantize.journal import FinishedTensor, Journal, JournalContent, read_journal
from quantize.plan import PlannedTensor

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Resume:
    """``directory`` is the run's own, beside its output: the journal and, of a calibrated run, the activations.

    It is there as long as there is something to go on from; its owner removes it once the output has its final name.
    """

    directory: Path
    fingerprint: str  # of all that the bytes depend on: source, recipe, calibration text, code, libraries
    on_resume: Callable[[int, int], None] | None = None  # told how many tensors were finished, and how many there are
    files: Mapping[str, str] = field(default_factory=dict)  # by name: texts that a run which starts anew puts there

    @property
    def journal(self) -> Path:
        return self.directory / "journal.jsonl"

    def discard(self) -> None:
        shutil.rmtree(self.directory, ignore_errors=True)

    def open(
        self,
        output: Path,
        planned: Sequence[PlannedTensor],
        max_shard_bytes: int,
        pool: Executor,
        can_start: Callable[[int], bool],
    ) -> Journal:
        """``can_start``: whether what the tensor of that number needs is still there. Raises OSError."""
        run = {"fingerprint": self.fingerprint, "max_shard_bytes": max_shard_bytes}
        content = _checked(read_journal(self.journal), run, output, planned)
        if content is not None and not can_start(len(content.finished)):
            log.warning("%s: the activations of the run before are missing; starting anew", self.directory)
            content = None
        if content is None:
            self._start_anew(output)
        else:
            self._tidy(output, {tensor.file for tensor in content.finished})
            if content.finished and self.on_resume is not None:
                self.on_resume(len(content.finished), len(planned))
        return Journal(self.journal, run, content, pool)

    @staticmethod
    def _tidy(output: Path, begun: set[str]) -> None:
        for file in output.iterdir():
            if file.name not in begun:
                file.unlink()

    def _start_anew(self, output: Path) -> None:
        if self.journal.exists():
            log.warning("%s: cannot be continued by this run; starting anew", output)
        self.discard()
        self.directory.mkdir(parents=True)
        for name, text in self.files.items():
            (self.directory / name).write_text(text, encoding="utf-8")
        shutil.rmtree(output)
        output.mkdir()


def _checked(
    content: JournalContent | None, run: dict[str, Any], output: Path, planned: Sequence[PlannedTensor]
) -> JournalContent | None:
    """None for another run's journal, and for one that speaks of more than there is."""
    if content is None or content.run != run or len(content.finished) > len(planned):
        return None
    names = [tensor.info.name for tensor in planned[: len(content.finished)]]
    if names != [tensor.report.name for tensor in content.finished]:
        return None
    return content if all(_is_there(output, tensor) for tensor in content.finished) else None


def _is_there(output: Path, tensor: FinishedTensor) -> bool:
    file = output / tensor.file
    return file.is_file() and file.stat().st_size >= tensor.end
