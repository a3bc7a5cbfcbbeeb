"""AWQ's factors, folded into the module that writes the input: the model computes the same, with no tensor added."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from quantize.calibration.layer_weights import LayerWeights
from quantize.prepared_tensor import PreparedTensor, vector

Float32 = npt.NDArray[np.float32]

_CLOSE = 0.1  # of a factor; further off, the stored vector has run out of digits


@dataclass(frozen=True)
class Folding:
    """Into a norm, whose weight is divided by the factors, or into the rows and bias of a linear."""

    weights: LayerWeights  # those of the producer are changed
    producer: str  # module name, in full
    channels: npt.NDArray[np.int64]  # [in]: the producer's channel that each input column is; several may share one
    dtype: np.dtype[Any]  # of the producer's vectors, as they are stored
    norm_adds_one: bool = False  # a norm is stored as w and scales by 1 + w, which ``weights`` have
    changed: dict[str, PreparedTensor] = field(default_factory=dict)

    def shared(self, mean_square: Float32) -> Float32:
        """E[x^2] [in], averaged over the columns that can only be scaled together."""
        counts = np.bincount(self.channels)
        means = np.bincount(self.channels, mean_square) / counts
        return means[self.channels].astype(np.float32)

    def shared_largest(self, values: Float32) -> Float32:
        """The largest of the columns that can only be scaled together, [in]."""
        largest = np.zeros(int(self.channels.max()) + 1, np.float32)
        np.maximum.at(largest, self.channels, values)
        return largest[self.channels]

    def fold(self, factors: Float32) -> Float32:
        """Divide the producer's channels by ``factors`` [in]; return them as they really are, [in]."""
        by_channel = np.ones(int(self.channels.max()) + 1)
        by_channel[self.channels] = factors
        if len(self.weights.shape(f"{self.producer}.weight")) == 1:
            by_channel = self._fold_vector(f"{self.producer}.weight", by_channel, self.norm_adds_one)
        else:
            if f"{self.producer}.bias" in self.weights:
                by_channel = self._fold_vector(f"{self.producer}.bias", by_channel)
            self.weights.scale_rows(f"{self.producer}.weight", by_channel)
        return by_channel[self.channels].astype(np.float32)

    def _fold_vector(
        self, name: str, factors: npt.NDArray[np.float64], adds_one: bool = False
    ) -> npt.NDArray[np.float64]:
        """Factors that leave no rounding error: those between the old vector and the new one as it is stored."""
        old = _stored(self.weights[name], adds_one).astype(self.dtype)
        wide = _scaling(old.astype(np.float64), adds_one)
        new = _stored(wide / factors, adds_one).astype(self.dtype)
        rounded = _scaling(new.astype(np.float64), adds_one)
        found = np.divide(wide, rounded, out=np.ones_like(wide), where=rounded != 0)
        kept = np.abs(found / factors - 1) > _CLOSE  # zeros and subnormal numbers stay as they are
        new, found = np.where(kept, old, new), np.where(kept, 1.0, found)
        self.weights[name] = _scaling(new.astype(np.float32), adds_one)
        self.changed[name] = vector(new)
        return found


def _stored(values: npt.NDArray[Any], adds_one: bool) -> npt.NDArray[Any]:
    return values - 1 if adds_one else values


def _scaling(values: npt.NDArray[Any], adds_one: bool) -> npt.NDArray[Any]:
    return values + 1 if adds_one else values


def input_channels(columns: int, channels: int, head_dim: int) -> npt.NDArray[np.int64]:
    """Which of so many ``channels`` of the producer each of so many input ``columns`` of a linear is, [in].

    In grouped-query attention several query heads read one value head, which v_proj writes for o_proj.
    """
    if columns == channels:
        return np.arange(columns)
    value_heads = np.arange(channels).reshape(-1, 1, head_dim)
    return np.repeat(value_heads, columns // channels, axis=1).reshape(columns)
