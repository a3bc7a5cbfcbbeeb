"""What config.json says of an automatic choice, written and read back."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from plansmith_errors import CheckpointError
from quantize.sensitivity.settings import Budget, Sensitivity

_SET = re.compile(r"model\.layers\.(\d{1,6})\.(.+)")


class SetRecord(BaseModel):
    """One set of linears that run-times fuse."""

    model_config = ConfigDict(frozen=True)

    chosen: Annotated[int, Field(ge=0)]  # of the candidates
    errors: tuple[float, ...]  # of each candidate


class ChoiceRecord(BaseModel):
    """``quantization_config.auto``; docs/mixed-precision.md describes it."""

    model_config = ConfigDict(frozen=True)

    sensitivity: Sensitivity
    budget: Budget
    bits_per_weight: float
    stored_bytes: int
    predicted_error: float
    candidates: tuple[str, ...]
    sets: dict[str, SetRecord]  # by the name of the first linear
    text: dict[str, Any] | None = None  # that sensitivity was measured on

    @model_validator(mode="after")
    def _is_consistent(self) -> ChoiceRecord:
        for name, found in self.sets.items():
            if _SET.fullmatch(name) is None or not found.chosen < len(found.errors) == len(self.candidates):
                raise ValueError(f"the entry of {name!r} does not fit the candidates")
        return self

    def data(self) -> dict[str, Any]:
        return self.model_dump(mode="json", exclude_none=True)

    def places(self) -> Iterator[tuple[str, int, int]]:
        """Module, layer and index of the chosen candidate of each set."""
        for name, found in self.sets.items():
            match = _SET.fullmatch(name)
            if match is not None:
                yield match[2], int(match[1]), found.chosen


def read_choice(quantization: Mapping[str, Any] | None, source: str) -> ChoiceRecord | None:
    """The record in a ``quantization_config``, None where there is none. Raises CheckpointError naming ``source``."""
    found = quantization.get("auto") if isinstance(quantization, Mapping) else None
    if found is None:
        return None
    try:
        return ChoiceRecord.model_validate(found)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in ("auto", *problem["loc"]))
        raise CheckpointError(
            f"{source}: quantization_config.{where}: {problem['msg']}; quantize the model again"
        ) from None
