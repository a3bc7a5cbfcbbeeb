"""One way of storing quantized models, as its configuration describes it."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from plansmith_errors import CheckpointError
from quantize.foreign.packed_weight import PackedWeight
from quantize.foreign.parts import Module

MOST_COLUMNS = 2**31


class Layout(ABC):
    """Made of the source's name and its quantization_config. Raises CheckpointError for what is not supported."""

    name: str

    @abstractmethod
    def __init__(self, source: str, config: Mapping[str, Any]) -> None: ...

    @abstractmethod
    def weight(self, module: Module) -> PackedWeight | None:
        """The weight that the module holds; None when it is not quantized. Raises CheckpointError."""

    def choice(self, source: str, config: Mapping[str, Any], key: str, known: tuple[Any, ...]) -> Any:
        """``config[key]``, which must be one of ``known``."""
        value = config.get(key)
        # type(): True is 1 otherwise
        if not any(type(value) is type(other) and value == other for other in known):
            names = ", ".join(json.dumps(other) for other in known if other not in (None, {}))
            raise CheckpointError(
                f"{source}: {key} is {shorten(value)}, expected {names or 'none'} in {self.name} files; "
                "quantize the original model"
            )
        return value

    def group_size(self, source: str, config: Mapping[str, Any], key: str) -> int | None:
        """Input columns that share a scale; None: all of them."""
        value = config.get(key)
        if type(value) is not int or not (value == -1 or 0 < value < MOST_COLUMNS):
            raise CheckpointError(f"{source}: {key} is {shorten(value)}, expected a number of columns or -1 for all")
        return None if value == -1 else value


def shorten(value: Any) -> str:
    """For a message."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def read_block(source: str, sizes: Any) -> tuple[int, int]:
    """A configuration's size of blocks, [rows, columns]. Raises CheckpointError."""
    valid = isinstance(sizes, list) and all(type(size) is int and 0 < size < MOST_COLUMNS for size in sizes)
    if not valid or len(sizes) != 2:
        raise CheckpointError(f"{source} is {shorten(sizes)}, expected [rows, columns]")
    return sizes[0], sizes[1]
