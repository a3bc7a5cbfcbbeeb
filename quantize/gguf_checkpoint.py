"""A GGUF file (architectures llama and qwen2) read as if it were a Hugging Face checkpoint."""

from __future__ import annotations

import re
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from plansmith_errors import CheckpointError
from quantize.checkpoint import Checkpoint, TensorInfo
from quantize.gguf_config import ROPE_FREQS, convert_config, convert_generation_config
from quantize.gguf_file import GgufFile

ARCHITECTURES = ("llama", "qwen2")
_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ONE_CALL_BYTES = 2**20
_QKV = ("attn_q", "attn_k", "attn_v")


class GgufCheckpoint(Checkpoint):
    """Tensors are dequantized to float32 when they are loaded. Raises CheckpointError."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = GgufFile(path)
        self.architecture = self._file.require("general.architecture", str)
        if self.architecture not in ARCHITECTURES:
            raise CheckpointError(
                f"{path}: architecture {self.architecture!r} is not supported; supported: {', '.join(ARCHITECTURES)}"
            )
        num_parts = self._file.get("split.count", int)
        if num_parts is not None and num_parts > 1:
            raise CheckpointError(f"{path}: is one of {num_parts} parts; join them first: llama-gguf-split --merge")
        self._ggml_names = self._map_names()
        self.config = convert_config(self._file, self.architecture, self._find_tied())
        self._check_shapes()
        self.origin = self._describe()

    def names(self) -> list[str]:
        return list(self._ggml_names)

    def __contains__(self, name: object) -> bool:
        return name in self._ggml_names

    def info(self, name: str) -> TensorInfo:
        tensor = self._file.tensors[self._ggml_name(name)]
        return TensorInfo(name, tensor.type_name, tensor.shape, tensor.nbytes)

    def load_dtype(self, name: str) -> np.dtype[Any]:
        self._ggml_name(name)
        return np.dtype(np.float32)

    def load_rows(self, name: str, begin: int, end: int) -> npt.NDArray[np.float32]:
        from gguf.constants import GGMLQuantizationType
        from gguf.quants import dequantize

        ggml_name = self._ggml_name(name)
        tensor, stored = self._file.tensors[ggml_name], self._file.rows(ggml_name)
        is_vector = len(tensor.shape) == 1
        if not is_vector:
            order = self._row_order(name)
            stored = stored[begin:end] if order is None else stored[order[begin:end]]
        num_rows = stored.shape[0]
        if stored.nbytes <= _ONE_CALL_BYTES:
            # gguf loops over 16 rows at a time, holding the GIL in between; blocks do not know of rows.
            stored = stored.reshape(1, -1)
        values: npt.NDArray[np.float32] = dequantize(stored, GGMLQuantizationType(tensor.type_id))
        return values.reshape(-1)[begin:end] if is_vector else values.reshape(num_rows, -1)

    def source_files(self) -> list[Path]:
        return [self.path]

    def side_files(self) -> dict[str, bytes]:
        return dict(self._side_files)

    @cached_property
    def _side_files(self) -> dict[str, bytes]:
        from quantize.gguf_tokenizer import convert_tokenizer

        return {**convert_tokenizer(self._file), "generation_config.json": convert_generation_config(self._file)}

    def _map_names(self) -> dict[str, str]:
        """Hugging Face name -> GGUF name, in the file's order; refuses tensors that are unknown or missing."""
        mapped: dict[str, str] = {}
        for ggml_name in self._file.tensors:
            if ggml_name == ROPE_FREQS:
                continue  # a table of the config, not a weight
            mapped[self._hf_name(ggml_name)] = ggml_name
            self._check_readable(ggml_name)
        missing = [name for name in self._expected_names() if name not in mapped]
        if missing:
            raise CheckpointError(f"{self.path}: tensor {missing[0]!r} is missing ({len(missing)} of the model's are)")
        return mapped

    def _hf_name(self, ggml_name: str) -> str:
        if ggml_name in _TOP_NAMES:
            return _TOP_NAMES[ggml_name]
        match = re.fullmatch(r"blk\.(\d{1,6})\.(\w+)\.(weight|bias)", ggml_name)
        if match is None or match[2] not in _LAYER_NAMES or (match[3] == "bias" and not self._has_bias(match[2])):
            kind = (
                "a mixture of experts" if "exp" in ggml_name or "ffn_gate_inp" in ggml_name else "a tensor unknown here"
            )
            raise CheckpointError(
                f"{self.path}: {ggml_name!r} belongs to {kind}; supported are dense {' and '.join(ARCHITECTURES)}"
            )
        return f"model.layers.{int(match[1])}.{_LAYER_NAMES[match[2]]}.{match[3]}"

    def _has_bias(self, part: str) -> bool:
        return self.architecture == "qwen2" and part in _QKV

    def _expected_names(self) -> list[str]:
        num_layers = self._file.require(f"{self.architecture}.block_count", int)
        if num_layers > len(self._file.tensors):
            raise CheckpointError(
                f"{self.path}: block_count is {num_layers}, but the file has {len(self._file.tensors)} tensors"
            )
        parts = [f"{name}.weight" for name in _LAYER_NAMES.values()]
        parts += [f"{_LAYER_NAMES[part]}.bias" for part in _LAYER_NAMES if self._has_bias(part)]
        layers = [f"model.layers.{layer}.{part}" for layer in range(num_layers) for part in parts]
        return ["model.embed_tokens.weight", "model.norm.weight", *layers]

    def _check_readable(self, ggml_name: str) -> None:
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
        from gguf.quants import dequantize

        tensor = self._file.tensors[ggml_name]
        ggml_type = GGMLQuantizationType(tensor.type_id)
        try:
            dequantize(np.zeros((1, GGML_QUANT_SIZES[ggml_type][1]), np.uint8), ggml_type)
        except RuntimeError:  # gguf says in this way that it has no code for the type
            raise CheckpointError(
                f"{self.path}: tensor {ggml_name!r} is {tensor.type_name}, which cannot be dequantized"
            ) from None

    def _find_tied(self) -> bool:
        if "lm_head.weight" not in self._ggml_names:
            return True
        head, embeddings = self._file.tensors["output.weight"], self._file.tensors["token_embd.weight"]
        if (head.type_id, head.shape) != (embeddings.type_id, embeddings.shape):
            return False
        if not np.array_equal(self._file.rows("output.weight"), self._file.rows("token_embd.weight")):
            return False
        del self._ggml_names["lm_head.weight"]  # the same bytes twice: some converters write a tied head out
        return True

    def _check_shapes(self) -> None:
        """The metadata and the tensors must describe one model; a mismatch means tampering or a mixed-up file."""
        config = self.config
        hidden, ffn, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
        q_rows, kv_rows = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
        expected = {
            "embed_tokens": (config["vocab_size"], hidden),
            "lm_head": (config["vocab_size"], hidden),
            "norm": (hidden,),
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
            "q_proj": (q_rows, hidden),
            "k_proj": (kv_rows, hidden),
            "v_proj": (kv_rows, hidden),
            "o_proj": (hidden, q_rows),
            "gate_proj": (ffn, hidden),
            "up_proj": (ffn, hidden),
            "down_proj": (hidden, ffn),
        }
        for tensor in self:
            *_, module, kind = tensor.name.split(".")
            shape = expected[module] if kind == "weight" else expected[module][:1]
            if tensor.shape != shape:
                raise CheckpointError(
                    f"{self.path}: {tensor.name!r} has shape {list(tensor.shape)}, the metadata says {list(shape)}"
                )

    def _row_order(self, name: str) -> npt.NDArray[np.intp] | None:
        """Which stored row each Hugging Face row is: llama.cpp interleaves the two halves of a head for `llama`."""
        heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(name.split(".")[-2])
        if heads is None or self.architecture != "llama":
            return None
        num_heads, head_dim = self.config[heads], self.config["head_dim"]
        order = np.arange(num_heads * head_dim).reshape(num_heads, head_dim // 2, 2)
        return order.swapaxes(1, 2).reshape(-1)

    def _ggml_name(self, name: str) -> str:
        if name not in self._ggml_names:
            raise CheckpointError(f"{self.path}: has no tensor {name!r} (it has {len(self)} others)")
        return self._ggml_names[name]

    def _describe(self) -> str:
        sizes: dict[str, int] = {}
        for tensor in self:
            if len(tensor.shape) == 2:
                sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.nbytes
        types = " and ".join(sorted(sizes, key=lambda dtype: -sizes[dtype]))
        return f"{types} (GGUF)" if set(sizes) <= {"F32", "F16", "BF16"} else f"dequantized from {types} (GGUF)"
