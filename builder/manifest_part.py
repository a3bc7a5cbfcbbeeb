"""The base of the manifest's parts."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class ManifestPart(BaseModel):
    """Frozen; an unknown field is refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")
