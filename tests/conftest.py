from pathlib import Path

import pytest
from gpu_engines import write_gpu_engine


@pytest.fixture
def gpu_engine(tmp_path: Path) -> Path:
    """An engine directory for one GPU of sm89, with a file in place of a plan."""
    return write_gpu_engine(tmp_path / "engine")
