"""A choice outlives a run that was killed after it: the next one goes on with it and measures nothing again."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace

from plansmith_errors import CheckpointError
from quantize.resume import Resume
from quantize.sensitivity.record import ChoiceRecord, read_choice

_FILE = "choice.json"


def read_kept_choice(resume: Resume) -> ChoiceRecord | None:
    """None when the run before made no choice, or was another run."""
    path = resume.directory / _FILE
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        is_ours = isinstance(data, dict) and data.get("fingerprint") == resume.fingerprint
        return read_choice(data, str(path)) if is_ours else None
    except (OSError, ValueError, CheckpointError):  # half of a file, of a run that was killed as it wrote it
        return None


def keeping_choice(resume: Resume, record: ChoiceRecord) -> Resume:
    """``resume`` for a run with this choice: tensors that were finished by another choice are no part of it."""
    kept = json.dumps({"fingerprint": resume.fingerprint, "auto": record.data()})
    digest = hashlib.sha256(kept.encode()).hexdigest()
    return replace(resume, fingerprint=f"{resume.fingerprint} {digest}", files={_FILE: kept})
