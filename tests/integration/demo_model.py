"""The demo's real model, where `make model` put it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def demo_model() -> Path:
    """Path of SmolLM2-135M-Instruct. `make test` fetches it; a bare pytest without it skips."""
    path = Path(
        os.environ.get("PLANSMITH_TEST_MODEL") or ROOT / ".cache" / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
    )
    if not path.is_file():
        pytest.skip(f"{path} is missing; fetch it with: make model")
    return path
