"""What calibration finds of the inputs of linears, and of keys and values: which are asked for, and their scales."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from plansmith_errors import QuantizeError
from quantize.activations import LARGEST, KvScheme, input_scale_name, kv_scale_name, pre_quant_scale_name
from quantize.calibration.linear_sets import LinearSet
from quantize.calibration.ranges import Ranges
from quantize.plan import PlannedTensor
from quantize.weight_rule import InputSettings

Float32 = npt.NDArray[np.float32]

_NAMED = 3  # of the modules that an error lists


class CalibratedInputs:
    """Scales are those of the layer with its factors folded. Raises QuantizeError where nothing was seen."""

    def __init__(self, planned: Sequence[PlannedTensor], kv_cache: KvScheme | None) -> None:
        self._planned = {tensor.info.name: tensor for tensor in planned}
        self._kv_largest = None if kv_cache is None else LARGEST[kv_cache]
        self._multipliers: dict[str, Float32] = {}  # pre_quant_scale, by the name of the weight
        self._values: dict[str, npt.NDArray[Any]] = {}  # of companions, by their names

    def is_smoothed(self, weight: str) -> bool:
        return weight in self._planned and self._planned[weight].is_smoothed

    def sees_inputs(self, weight: str) -> bool:
        """Whether the plan of the tensor depends on the inputs that calibration shows."""
        return weight in self._planned and (
            self.is_smoothed(weight) or self._waits_for(weight, input_scale_name(weight))
        )

    def smoothed_sets(self, linears: LinearSet, prefix: str) -> list[list[PlannedTensor]]:
        """The smoothed linears of a set, those of one setting together."""
        by_setting: dict[InputSettings, list[PlannedTensor]] = {}
        for module in linears.modules:
            tensor = self._planned.get(f"{prefix}{module}.weight")
            if tensor is not None and tensor.inputs is not None and tensor.is_smoothed:
                by_setting.setdefault(tensor.inputs, []).append(tensor)
        return list(by_setting.values())

    def smoothed_ranges(self, prefix: str) -> Ranges:
        """Of the inputs that decide smoothing factors."""
        return Ranges(name for name in self._of_layer(prefix) if self._planned[name].is_smoothed)

    def static_ranges(self, prefix: str) -> Ranges:
        """Of the inputs, keys and values that get a static scale."""
        wanted = [name for name in self._of_layer(prefix) if self._waits_for(name, input_scale_name(name))]
        scales = [kv_scale_name(name) for name in self._of_layer(prefix)]
        return Ranges([*wanted, *(scale for scale in scales if scale is not None and self._kv_largest is not None)])

    def set_multiplier(self, weights: Iterable[str], multiplier: Float32, largest: Float32 | None) -> None:
        """What the inputs of these linears are multiplied with, [in], and their ``largest`` magnitudes before, [in].

        The factors were made for this range, so a static scale is that of their product, as ModelOpt has it. None: the
        scale is found later.
        """
        for name in weights:
            self._multipliers[name] = self._values[pre_quant_scale_name(name)] = multiplier
            if largest is not None and self._waits_for(name, input_scale_name(name)):
                self._set_scale(name, (largest * multiplier).max())

    def set_scales(self, ranges: Ranges) -> None:
        """The static scales of a layer."""
        one = np.float32(1)
        found = {name: (columns * self._multipliers.get(name, one)).max() for name, columns in ranges.items()}
        unseen = [name for name, largest in found.items() if not self._set_scale(name, largest)]
        if unseen:
            named = ", ".join(name.removesuffix(".weight") for name in unseen[:_NAMED])
            more = f" and {len(unseen) - _NAMED} more" if len(unseen) > _NAMED else ""
            raise QuantizeError(
                f"calibration saw nothing but zeros (or no finite value) at {named}{more}, so there is no static "
                "scale; give another calibration text, or activation_scale token"
            )

    def _set_scale(self, name: str, largest: np.float32) -> bool:
        """False when there is nothing to take a scale from; then it still waits for one."""
        if not np.isfinite(largest) or largest <= 0:
            return False
        divisor, stored = self._target(name)
        self._values[stored] = np.array(max(largest / np.float32(divisor), np.finfo(np.float32).tiny), np.float32)
        return True

    def companions(self, weight: str) -> tuple[npt.NDArray[Any], ...]:
        """Values of the tensor's companions, in their order."""
        return tuple(self._values.pop(spec.name) for spec in self._planned[weight].companions)

    def _target(self, name: str) -> tuple[float, str]:
        """The largest quantized value, and the tensor that takes the scale. Keys and values go by the latter's name."""
        tensor = self._planned.get(name)
        if tensor is not None and tensor.inputs is not None:
            return LARGEST[tensor.inputs.activations.scheme], input_scale_name(name)
        return self._kv_largest or 0.0, name

    def _of_layer(self, prefix: str) -> list[str]:
        return [name for name in self._planned if name.startswith(prefix)]

    def _waits_for(self, weight: str, companion: str) -> bool:
        return companion not in self._values and any(
            spec.name == companion for spec in self._planned[weight].companions
        )
