"""Which layers attend to a window of the tokens before, and how long it is, in each family."""

from __future__ import annotations

from builder.config_reader import ConfigReader
from plansmith_errors import BuildError

# Of transformers' configs, where the key is absent.
_QWEN_MAX_WINDOW_LAYERS = 28
_SLIDING_WINDOW = 4096  # of Mistral, Gemma 2 and Gemma 3
_GEMMA_PATTERNS = {"gemma2": 2, "gemma3_text": 6}  # every so many layers attend fully, the others slide


def read_sliding_windows(reader: ConfigReader, model_type: str, num_layers: int) -> tuple[int | None, ...]:
    """Of each layer, in tokens, the query's own included; None: full attention. Raises BuildError."""
    if model_type in ("llama", "granite"):
        return (None,) * num_layers
    if model_type == "mistral":
        absent = "sliding_window" not in reader.config
        window = _SLIDING_WINDOW if absent else _optional_window(reader)
        return (window,) * num_layers
    if model_type in ("mixtral", "phi3"):
        return (_optional_window(reader),) * num_layers
    if model_type == "qwen3_moe":  # unlike Qwen3's dense models, all layers or none
        slides = reader.boolean("use_sliding_window", False)
        return (_optional_window(reader) if slides else None,) * num_layers
    if model_type in _GEMMA_PATTERNS:
        return _gemma_windows(reader, model_type, num_layers)
    window = _optional_window(reader) if reader.boolean("use_sliding_window", False) else None
    kinds = _layer_types(reader, num_layers)
    if kinds is None:  # in older configs all layers from max_window_layers on
        first = reader.integer("max_window_layers", _QWEN_MAX_WINDOW_LAYERS, minimum=0)
        kinds = [layer >= first for layer in range(num_layers)]
    return tuple(window if sliding else None for sliding in kinds)


def _gemma_windows(reader: ConfigReader, model_type: str, num_layers: int) -> tuple[int | None, ...]:
    kinds = _layer_types(reader, num_layers)
    if kinds is None:
        pattern = _GEMMA_PATTERNS[model_type]
        if model_type == "gemma3_text":
            pattern = reader.integer("sliding_window_pattern", pattern)
        kinds = [(layer + 1) % pattern != 0 for layer in range(num_layers)]
    window = reader.integer("sliding_window", None if "sliding_window" in reader.config else _SLIDING_WINDOW)
    return tuple(window if sliding else None for sliding in kinds)


def _optional_window(reader: ConfigReader) -> int | None:
    return None if reader.get("sliding_window") is None else reader.integer("sliding_window")


def _layer_types(reader: ConfigReader, num_layers: int) -> list[bool] | None:
    """Which layers slide by ``layer_types``; None where there is no such key."""
    kinds = reader.get("layer_types")
    if kinds is None:
        return None
    known = {"full_attention", "sliding_attention"}
    if not isinstance(kinds, list) or len(kinds) != num_layers or not known.issuperset(map(str, kinds)):
        raise BuildError(
            f"{reader.where}: layer_types must name full_attention or sliding_attention for each of {num_layers} layers"
        )
    return [kind == "sliding_attention" for kind in kinds]
