"""Shared memory that a server's Python backend leaves behind when it is killed."""

from __future__ import annotations

import logging
import secrets
from pathlib import Path

logger = logging.getLogger(__name__)

DIRECTORY = Path("/dev/shm")


def unique_prefix() -> str:
    """A name for the regions of one server, so that they can be told from those of all others."""
    return f"plansmith_{secrets.token_hex(6)}_"


def sweep(prefix: str) -> int:
    """Remove the regions of a server that has ended; returns how many there were."""
    regions = list(DIRECTORY.glob(f"{prefix}*"))
    for region in regions:
        region.unlink(missing_ok=True)
    if regions:
        logger.info("removed %d shared memory regions that the server left behind", len(regions))
    return len(regions)
