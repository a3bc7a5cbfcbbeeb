"""A checkpoint seen through rotations R1 and R2 (SpinQuant, arXiv 2405.16406): other weights, the same logits."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from plansmith_errors import QuantizeError
from quantize.checkpoint import Checkpoint, TensorInfo
from quantize.model_shape import EMBEDDINGS, FINAL_NORM, LM_HEAD, ModelShape
from quantize.recipe import Rotation
from quantize.rotation.orthogonal import RandomHadamard

log = logging.getLogger(__name__)

Float32 = npt.NDArray[np.float32]

# Whose norms are RMSNorm and whose blocks write straight to the sum, at most times a number; Gemma has norms between.
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "phi3", "granite")
_SEED = 0
_NORM_BEFORE = {
    "self_attn.q_proj": "input_layernorm",
    "self_attn.k_proj": "input_layernorm",
    "self_attn.v_proj": "input_layernorm",
    "mlp.gate_proj": "post_attention_layernorm",
    "mlp.up_proj": "post_attention_layernorm",
}
_WRITERS = ("self_attn.o_proj", "mlp.down_proj")


def rotated(source: Checkpoint, rotations: Sequence[Rotation]) -> Checkpoint:
    """``source`` itself when there is nothing to rotate. Raises QuantizeError for a model that cannot be."""
    return RotatedCheckpoint(source, rotations) if rotations else source


class RotatedCheckpoint(Checkpoint):
    """R1 turns the residual stream: what writes it is multiplied by Q, what reads it by Q'. RMSNorm commutes with Q
    once its weights are folded into its readers. R2 turns the values of each head, between v_proj and o_proj.

    A tied head becomes a matrix of its own, since only one side of it takes up the last norm. Raises QuantizeError.
    """

    def __init__(self, source: Checkpoint, rotations: Sequence[Rotation]) -> None:
        if source.config.get("model_type") not in FAMILIES:
            raise QuantizeError(
                f"{source.path}: rotations are for {', '.join(FAMILIES)} models, found "
                f"{source.config.get('model_type')!r}; leave rotations out of the recipe"
            )
        config = {**source.config, "tie_word_embeddings": source.is_tied}
        shape = ModelShape.from_config(config, str(source.path / "config.json"))
        self._source = source
        self._residual = RandomHadamard(shape.hidden_size, _SEED) if "r1" in rotations else None
        self._head = RandomHadamard(shape.head_dim, _SEED + 1) if "r2" in rotations else None
        self._unties = self._residual is not None and source.is_tied
        if self._unties:
            log.warning("%s: rotation r1 unties the head: lm_head.weight is stored beside the embeddings", source.path)
        self._lock = threading.Lock()
        self._whole: tuple[str, Float32] | None = None
        self.path = source.path
        self.config: dict[str, Any] = {**config, "tie_word_embeddings": source.is_tied and not self._unties}
        self.origin = f"{source.origin}, rotated ({', '.join(rotations)})"

    def names(self) -> list[str]:
        names = [name for name in self._source.names() if name != LM_HEAD or not self._unties]
        return [*names, LM_HEAD] if self._unties else names

    def info(self, name: str) -> TensorInfo:
        return replace(self._source.info(self._stored_name(name)), name=name)

    def load_dtype(self, name: str) -> np.dtype[Any]:
        return self._source.load_dtype(name) if _is_norm(name) else np.dtype(np.float32)

    def release(self, name: str) -> None:
        self._source.release(self._stored_name(name))

    def kept_dtype(self, name: str) -> np.dtype[Any]:
        return self._source.kept_dtype(self._stored_name(name))

    def load_rows(self, name: str, begin: int, end: int) -> npt.NDArray[Any]:
        prefix, module, kind = _split(name)
        if _is_norm(name):
            rows = self._source.load_rows(name, begin, end)
            is_folded = self._residual is not None and not module.startswith("self_attn.")  # not the norms of q and k
            return np.ones_like(rows) if is_folded else rows
        if module in _WRITERS or (module == "self_attn.v_proj" and self._head is not None):
            return self._load_whole(name)[begin:end]
        rows = self._source.load_rows(self._stored_name(name), begin, end).astype(np.float32)
        return rows if kind == "bias" else self._turn_inputs(rows, prefix, module)

    def source_files(self) -> list[Path]:
        return self._source.source_files()

    def side_files(self) -> dict[str, bytes]:
        return self._source.side_files()

    def _load_whole(self, name: str) -> Float32:
        """Of a tensor whose rows are sums of all rows. It stays until the next one, since it is read in chunks."""
        with self._lock:
            if self._whole is None or self._whole[0] != name:
                self._whole = None  # before the next one is made: they are large
                self._whole = (name, self._turn_outputs(name))
            return self._whole[1]

    def _turn_inputs(self, rows: Float32, prefix: str, module: str) -> Float32:
        """Rows [n, hidden_size] of what reads the residual stream, or of the embeddings, which begin it."""
        if self._residual is None:
            return rows
        norm = FINAL_NORM if module == "lm_head" else f"{prefix}{_NORM_BEFORE.get(module, '')}.weight"
        if module in _NORM_BEFORE or module == "lm_head":
            rows = rows * self._source.load_float32(norm)
        return self._residual.apply(rows)

    def _turn_outputs(self, name: str) -> Float32:
        """A weight [out, in] or bias [out] of v_proj or of what writes the residual stream; outputs are its rows."""
        prefix, module, kind = _split(name)
        values = self._source.load(name).astype(np.float32)
        if module == "self_attn.v_proj":
            values = values if kind == "bias" else self._turn_inputs(values, prefix, module)
            return np.ascontiguousarray(self._by_heads(values.T).T)
        if module == "self_attn.o_proj" and kind == "weight":
            values = self._by_heads(values)
        return values if self._residual is None else np.ascontiguousarray(self._residual.apply(values.T).T)

    def _by_heads(self, values: Float32) -> Float32:
        """The last axis [..., num_heads * head_dim], every head turned by itself."""
        if self._head is None:
            return values
        return self._head.apply(values.reshape(*values.shape[:-1], -1, self._head.size)).reshape(values.shape)

    def _stored_name(self, name: str) -> str:
        return EMBEDDINGS if self._unties and name == LM_HEAD else name


def _is_norm(name: str) -> bool:
    return name.endswith("norm.weight")


def _split(name: str) -> tuple[str, str, str]:
    """("model.layers.3.", "mlp.up_proj", "weight"); ("", "lm_head", "weight") outside the layers."""
    stem, _, kind = name.rpartition(".")
    parts = stem.split(".", 3)
    return (".".join(parts[:3]) + ".", parts[3], kind) if stem.startswith("model.layers.") else ("", stem, kind)
