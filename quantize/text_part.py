"""The language model within a Gemma 3 model that sees images too: its config and its tensors, as of a model by itself.

Published files have ``language_model.model.`` before the decoder's names; transformers 5 has ``model.language_model.``
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy.typing as npt

from plansmith_errors import CheckpointError
from quantize.checkpoint import Checkpoint, TensorInfo
from quantize.checkpoint_view import CheckpointView

log = logging.getLogger(__name__)

_WHOLE, _TEXT = "gemma3", "gemma3_text"
_PREFIXES = {
    "language_model.model.": "model.",
    "model.language_model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "lm_head.": "lm_head.",
}
# Published configs leave out what is transformers' default of Gemma3TextConfig.
_DEFAULTS = {
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}
_OF_THE_WHOLE = (  # said in the outer config, which counts where both say it
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "tie_word_embeddings",
    "dtype",
    "torch_dtype",
    "quantization_config",
)


def text_config(config: Mapping[str, Any], source: str) -> dict[str, Any]:
    """The config of the language model alone; of any other model, its own. Raises CheckpointError."""
    if config.get("model_type") != _WHOLE:
        return dict(config)
    text = config.get("text_config")
    if not isinstance(text, dict) or text.get("model_type", _TEXT) != _TEXT:
        raise CheckpointError(f"{source}: expected a text_config whose model_type is {_TEXT!r}")
    if text.get("final_logit_softcapping") is not None:  # the language model by itself would cap, the whole does not
        raise CheckpointError(f"{source}: text_config has final_logit_softcapping, which {_WHOLE} models do not apply")
    outer = {key: config[key] for key in _OF_THE_WHOLE if config.get(key) is not None}
    found = {key: value for key, value in {**text, **outer}.items() if value is not None}
    return {**text, **_DEFAULTS, **found, "model_type": _TEXT, "architectures": ["Gemma3ForCausalLM"]}


def text_part(source: Checkpoint) -> Checkpoint:
    """``source`` itself when it is a language model. Raises CheckpointError."""
    return TextCheckpoint(source) if source.config.get("model_type") == _WHOLE else source


class TextCheckpoint(CheckpointView):
    """Tensors of the language model under the names that it has by itself; all others are left out."""

    def __init__(self, source: Checkpoint) -> None:
        super().__init__(source)
        self.config = text_config(source.config, f"{source.path}: config.json")
        self._stored = {own: name for name in source.names() if (own := _own_name(name))}
        log.warning(
            "%s: the language model is read, without the %d tensors that see images",
            source.path,
            len(source) - len(self._stored),
        )

    def names(self) -> list[str]:
        return list(self._stored)

    def __contains__(self, name: object) -> bool:
        return name in self._stored

    def info(self, name: str) -> TensorInfo:
        return replace(self._source.info(self._stored_name(name)), name=name)

    def load_rows(self, name: str, begin: int, end: int) -> npt.NDArray[Any]:
        return self._source.load_rows(self._stored_name(name), begin, end)

    def _stored_name(self, name: str) -> str:
        if name not in self._stored:
            raise CheckpointError(f"{self.path}: has no tensor {name!r} (it has {len(self)} others)")
        return self._stored[name]


def _own_name(name: str) -> str:
    for prefix, own in _PREFIXES.items():
        if name.startswith(prefix):
            return own + name.removeprefix(prefix)
    return ""
