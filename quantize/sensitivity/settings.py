"""What a recipe says about the automatic choice of precision."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Sensitivity = Literal["kl", "output", "weights"]

_MEASURE: dict[str, Sensitivity | None] = {
    "bits_per_weight": None,
    "size_gb": None,
    "kl": "kl",
    "output_error": "output",
}


class Budget(BaseModel):
    """One of these: a size, of which the predicted error is made least, or an error, reached with the least size."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    bits_per_weight: float | None = Field(
        default=None, gt=0, description="of all linears of the decoder layers together, scales included"
    )
    size_gb: float | None = Field(default=None, gt=0, description="of all stored tensors, 10^9 bytes")
    kl: float | None = Field(
        default=None, gt=0, description="predicted KL divergence to the unquantized model, nats per token"
    )
    output_error: float | None = Field(
        default=None, gt=0, description="predicted relative error of the hidden states after the last layer"
    )

    @model_validator(mode="after")
    def _names_one(self) -> Budget:
        given = [key for key in _MEASURE if getattr(self, key) is not None]
        if len(given) != 1:
            raise ValueError(f"names {', '.join(given) or 'nothing'}; name one of {', '.join(_MEASURE)}")
        return self

    @property
    def key(self) -> str:
        return next(key for key in _MEASURE if getattr(self, key) is not None)

    @property
    def value(self) -> float:
        return float(getattr(self, self.key))

    @property
    def measure(self) -> Sensitivity | None:
        """The sensitivity in whose unit the budget is; None for a size."""
        return _MEASURE[self.key]
