"""A checkpoint that another tool quantized, with the names and shapes of the plain model."""

from __future__ import annotations

import logging
from collections import Counter
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from plansmith_errors import CheckpointError
from quantize.checkpoint import Checkpoint, TensorInfo
from quantize.foreign.layout import Layout
from quantize.foreign.packed_weight import PackedWeight
from quantize.foreign.parts import Module
from quantize.model_shape import ModelShape

log = logging.getLogger(__name__)

# What inputs, outputs and the KV cache were scaled by, where the weights do not depend on it.
_ACTIVATIONS = frozenset(
    f"{what}_{kind}"
    for what in ("input", "output", "q", "k", "v", "kv", "prob_output")
    for kind in ("scale", "zero_point")
) | {"input_global_scale"}


class ForeignCheckpoint(Checkpoint):
    """Quantized matrices are dequantized to float32 by rows; everything else is read as it is stored.

    Raises CheckpointError where config, headers and the layout's rules do not agree.
    """

    def __init__(self, source: Checkpoint, layout: Layout) -> None:
        self._source = source
        self.path = source.path
        self.config: dict[str, Any] = {
            key: value for key, value in source.config.items() if key != "quantization_config"
        }
        self._weights: dict[str, PackedWeight] = {}
        self._names: dict[str, None] = {}  # in the order of the files
        self._read_modules(layout)
        self._check_shapes()
        self.origin = self._describe(layout.name)

    def packed(self, name: str) -> PackedWeight | None:
        """The weight as it is stored; None for a tensor that is not quantized."""
        return self._weights.get(name)

    @property
    def largest_int4_group(self) -> int | None:
        """The most input columns that share a scale in a matrix of int4; None when there is none."""
        forms = [weight.form for weight in self._weights.values()]
        return max((form.group_size or 0 for form in forms if form is not None and form.scheme == "int4"), default=None)

    def names(self) -> list[str]:
        return list(self._names)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def info(self, name: str) -> TensorInfo:
        weight = self._weights.get(name)
        return self._source.info(name) if weight is None else TensorInfo(name, weight.kind, weight.shape, weight.nbytes)

    def load_dtype(self, name: str) -> np.dtype[Any]:
        return np.dtype(np.float32) if name in self._weights else self._source.load_dtype(name)

    def load_rows(self, name: str, begin: int, end: int) -> npt.NDArray[Any]:
        weight = self._weights.get(name)
        return self._source.load_rows(name, begin, end) if weight is None else weight.rows(begin, end)

    def release(self, name: str) -> None:
        weight = self._weights.get(name)
        for stored in [name] if weight is None else [part.info.name for part in weight.parts]:
            self._source.release(stored)

    def source_files(self) -> list[Path]:
        return self._source.source_files()

    def side_files(self) -> dict[str, bytes]:
        return self._source.side_files()

    def _read_modules(self, layout: Layout) -> None:
        kinds: dict[str, list[str]] = {}
        for name in self._source.names():
            module, _, kind = name.rpartition(".")
            kinds.setdefault(module, []).append(kind)
        unused: list[str] = []
        for module, stored in kinds.items():
            weight = layout.weight(Module(self._source, module, stored))
            taken = set()
            if weight is not None:
                taken = {part.info.name for part in weight.parts}
                self._weights[f"{module}.weight"] = weight
                self._names[f"{module}.weight"] = None
            rest = [kind for kind in stored if f"{module}.{kind}" not in taken]
            unused += [f"{module}.{kind}" for kind in rest if kind in _ACTIVATIONS]
            self._add_plain(module, [kind for kind in rest if kind not in _ACTIVATIONS])
        if unused:
            log.warning(
                "%s: scales of inputs and of the KV cache are left out (%s, %d such); only weights are read",
                self.path,
                unused[0],
                len(unused),
            )

    def _add_plain(self, module: str, kinds: list[str]) -> None:
        for name in (f"{module}.{kind}" if module else kind for kind in kinds):
            if name in self._names:
                raise CheckpointError(f"{self.path}: holds {name!r} both quantized and not; get the checkpoint again")
            self._names[name] = None

    def _check_shapes(self) -> None:
        shape = ModelShape.from_config(
            {**self.config, "tie_word_embeddings": self.is_tied}, f"{self.path}: config.json"
        )
        for name, linear in shape.linear_weights():
            weight, expected = self._weights.get(name), (linear.out_features, linear.in_features)
            if weight is not None and weight.shape != expected:
                raise CheckpointError(
                    f"{self.path}: {name!r} is packed as {list(weight.shape)}, config.json says {list(expected)}; "
                    "get the checkpoint again"
                )
            if weight is not None and not linear.has_bias:
                self._drop_empty_bias(name.removesuffix("weight") + "bias")

    def _drop_empty_bias(self, name: str) -> None:
        """Some writers give every packed linear a bias of zeros, which the model has no place for."""
        if name in self._names and not self._source.load(name).any():
            del self._names[name]

    def _describe(self, layout: str) -> str:
        sizes: Counter[str] = Counter()
        for weight in self._weights.values():
            sizes[weight.kind] += prod(weight.shape)
        kinds = " and ".join(kind for kind, _ in sizes.most_common())
        return f"dequantized from {layout} {kinds} (safetensors)" if kinds else self._source.origin
