"""What a network computes from its constants alone: computed when it is first wanted, and kept while there is room."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from builder.network.interpreter.evaluate import evaluate
from builder.network.interpreter.nodes import Declared, Node
from builder.network.interpreter.operations import ATTENTION_OUTPUT, COLLECTIVE, CONSTANT
from builder.network.interpreter.values import Array, Payload, as_float, decode_payload
from plansmith_errors import BuildError

_NEVER_CONSTANT = {COLLECTIVE, ATTENTION_OUTPUT, "ATTENTION_INPUT", "KV_CACHE_UPDATE"}


class Constants:
    """Tensors that depend on no input, by name. ``external``: inputs of the network whose payload never changes."""

    def __init__(
        self,
        nodes: Iterable[Node],
        payloads: Mapping[str, Payload],
        external: Mapping[str, Payload],
        cache_bytes: int,
    ) -> None:
        self._payloads, self._external = payloads, external
        self._producers: dict[str, tuple[Node, int]] = {}
        self._cache: dict[str, Array] = {}
        self._room = cache_bytes
        self.live: list[Node] = []  # the layers that are left to compute in a step
        for node in nodes:
            if self._is_constant(node):
                self._producers |= {output.name: (node, index) for index, output in enumerate(node.outputs)}
            else:
                self.live.append(node)

    def __contains__(self, name: object) -> bool:
        return name in self._producers or name in self._external

    def __getitem__(self, name: str) -> Array:
        """Raises BuildError where the bytes of a constant are not known."""
        if name in self._cache:
            return self._cache[name]
        values = self._compute(name)
        if values.nbytes <= self._room:
            self._room -= values.nbytes
            self._cache[name] = values
        return values

    def _compute(self, name: str) -> Array:
        if name in self._external:
            return decode_payload(self._external[name])
        node, index = self._producers[name]
        if node.kind == CONSTANT:
            return _decode(node, self._payloads.get(node.name))
        # What is only a step on the way (an int4 weight before its scale) would fill the cache for nothing.
        inputs = [None if x is None else self._cache[x] if x in self._cache else self._compute(x) for x in node.inputs]
        values: Array = evaluate(node, inputs)[index]
        return values

    def _is_constant(self, node: Node) -> bool:
        if node.kind == CONSTANT:
            return True
        given = [name for name in node.inputs if name is not None]
        return bool(given) and node.kind not in _NEVER_CONSTANT and all(name in self for name in given)


def _decode(node: Node, payload: Payload | None) -> Array:
    declared = node.outputs[0]
    held = node.layer.weights  # an array, or an opaque object for the types that NumPy does not have
    if payload is None:
        if not isinstance(held, np.ndarray):
            raise BuildError(f"{node}: bytes of {declared.dtype} cannot be read back, and none were kept for it")
        return as_float(held).reshape(declared.shape)
    _check_payload(node, declared, payload, held)
    return decode_payload(payload)


def _check_payload(node: Node, declared: Declared, payload: Payload, held: Any) -> None:
    if (payload.dtype, tuple(payload.shape)) != (declared.dtype, declared.shape):
        raise BuildError(
            f"{node}: {payload.dtype} {list(payload.shape)} was kept for it; "
            f"the network holds {declared.dtype} {list(declared.shape)}"
        )
    if isinstance(held, np.ndarray) and held.tobytes() != np.ascontiguousarray(payload.array).tobytes():
        raise BuildError(f"{node}: the network holds other bytes than those that were kept for it")
