"""The tokens that a calibration looks at, and where they came from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from quantize.calibration.runner import CalibrationTools
from quantize.calibration.settings import CalibrationSettings
from quantize.calibration.text import calibration_file, read_documents, text_sha256
from quantize.calibration.windows import choose_windows, load_tokenizer, token_ids
from quantize.checkpoint import Checkpoint


@dataclass(frozen=True)
class CalibrationSample:
    windows: npt.NDArray[np.int64]  # [num_samples, sequence_length]
    settings: CalibrationSettings
    text: str  # file name
    sha256: str  # of the file

    def record(self) -> dict[str, Any]:
        """What config.json says of it: the same on every machine."""
        num_samples, sequence_length = self.windows.shape
        return {
            "text": self.text,
            "sha256": self.sha256,
            "seed": self.settings.seed,
            "num_samples": num_samples,
            "sequence_length": sequence_length,
            "num_tokens": self.windows.size,
        }


def load_sample(checkpoint: Checkpoint, settings: CalibrationSettings, tools: CalibrationTools) -> CalibrationSample:
    """Read, tokenize and choose. Raises QuantizeError."""
    path = calibration_file(settings.text)
    render = tools.render_chat
    documents = read_documents(path, None if render is None else lambda messages: render(checkpoint, messages))
    vocab_size = checkpoint.info("model.embed_tokens.weight").shape[0]
    ids = token_ids(load_tokenizer(checkpoint), documents, vocab_size)
    windows = choose_windows(ids, settings.num_samples, settings.sequence_length, settings.seed, path.name)
    return CalibrationSample(windows, settings, path.name, text_sha256(path))
