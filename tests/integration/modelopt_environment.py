"""Runs ModelOpt in its own environment (``make modelopt``), in float32, on the tokens that our calibration takes."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import quantize

ROOT = Path(__file__).parents[2]
PYTHON = Path(os.environ.get("PLANSMITH_MODELOPT_PYTHON", ROOT / ".cache" / "modelopt" / "bin" / "python"))
CALIBRATION = {"num_samples": 4, "sequence_length": 64}


def run_modelopt(script: str, source: Path, text: Path, folder: Path, tools: Any) -> Path:
    """``folder``, with the exports of ``script`` in it."""
    from quantize.calibration.sample import load_sample

    if not PYTHON.exists():
        pytest.fail(f"{PYTHON} does not exist; run: make modelopt")
    settings = quantize.CalibrationSettings(text=text, **CALIBRATION)
    np.save(folder / "windows.npy", load_sample(quantize.open_checkpoint(source), settings, tools).windows)
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [
            str(PYTHON),
            str(Path(__file__).parent / "modelopt" / script),
            str(source),
            str(folder / "windows.npy"),
            folder,
        ],
        env=environment | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return folder
