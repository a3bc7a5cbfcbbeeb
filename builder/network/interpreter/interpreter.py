"""Execute an INetworkDefinition."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np

from builder.network.interpreter.constants import Constants
from builder.network.interpreter.evaluate import check_declared, evaluate
from builder.network.interpreter.nodes import Node, declared, read_nodes
from builder.network.interpreter.operations import COLLECTIVE, INTERFACES
from builder.network.interpreter.values import Array, Payload, as_float, as_stored, round_to, to_stored
from plansmith_errors import BuildError

Collective: TypeAlias = Callable[[str, Mapping[str, Any], Array], Array]
"""Called with the layer's name, the JSON of its metadata and this rank's float32 tensor; returns what the rank gets."""
Observer: TypeAlias = Callable[[Node, Array], None]
"""Called with each computed layer and its first output, whose memory is the network's own."""

_OUT = "_out."  # "key_pool_out.3" is bound to the memory of "key_pool.3"


class Interpreter:
    """One rank's network. Not for two threads at once."""

    def __init__(
        self,
        trt: Any,
        network: Any,
        payloads: Mapping[str, Payload],
        collective: Collective | None = None,
        *,
        external: Mapping[str, Payload] | None = None,
        cache_bytes: int = 4 << 30,
    ) -> None:
        """``trt``: the module that made ``network``. ``payloads``: bytes of constants, by the names of their layers.

        ``external``: weights that are network inputs. ``cache_bytes``: for weights as float32; what does not fit is
        decoded anew in each step. Raises BuildError for a layer of an unknown type.
        """
        nodes = read_nodes(trt, network, INTERFACES)
        self._constants = Constants(nodes, payloads, external or {}, cache_bytes)
        inputs = [declared(network.get_input(index)) for index in range(network.num_inputs)]
        self._inputs = {tensor.name: tensor for tensor in inputs if tensor.name not in self._constants}
        self._outputs = [declared(network.get_output(index)) for index in range(network.num_outputs)]
        self._collective = collective
        self._last_uses = _last_uses(self._constants.live, {tensor.name for tensor in self._outputs})

    @property
    def input_names(self) -> list[str]:
        """Those that ``run`` wants; external weights are not among them."""
        return list(self._inputs)

    def run(self, feeds: Mapping[str, Array], observe: Observer | None = None) -> dict[str, Array]:
        """Compute all outputs. Pools are written in place: "key_pool_out.N" is what was given as "key_pool.N".

        ``feeds``: arrays of the declared types, bfloat16 as such or as uint16. Raises BuildError, naming the layer.
        """
        values = self._checked(feeds)
        with np.errstate(all="ignore"):  # infinity and NaN are results, as they are on a GPU
            for node, done in zip(self._constants.live, self._last_uses, strict=True):
                results = self._evaluate(node, values)
                values |= {output.name: result for output, result in zip(node.outputs, results, strict=True)}
                if observe is not None and isinstance(results[0], np.ndarray):
                    observe(node, results[0])
                for name in done:
                    values.pop(name, None)
        outputs = {tensor.name: to_stored(tensor.dtype, self._value(tensor.name, values)) for tensor in self._outputs}
        _write_back(outputs, feeds)
        return outputs

    def _checked(self, feeds: Mapping[str, Array]) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for name, tensor in self._inputs.items():
            if name not in feeds:
                raise BuildError(f"the network's input {name!r} was not given; given: {', '.join(sorted(feeds))}")
            try:
                values[name] = as_stored(tensor.dtype, feeds[name])
            except ValueError as error:
                raise BuildError(f"the network's input {name!r} {error}") from None
            check_declared("the network's input", tensor, values[name])
        return values

    def _value(self, name: str | None, values: Mapping[str, Any]) -> Any:
        if name is None:
            return None
        return self._constants[name] if name in self._constants else values[name]

    def _evaluate(self, node: Node, values: Mapping[str, Any]) -> tuple[Any, ...]:
        inputs = [self._value(name, values) for name in node.inputs]
        if node.kind != COLLECTIVE:
            return evaluate(node, inputs)
        if self._collective is None:
            raise BuildError(f"{node}: a network of several ranks needs them all; run them in lockstep")
        (output,) = node.outputs
        result = round_to(output.dtype, self._collective(node.name, _metadata(node), as_float(inputs[0])))
        check_declared(str(node), output, result)
        return (result,)


def _metadata(node: Node) -> Mapping[str, Any]:
    try:
        metadata = json.loads(node.layer.metadata)
    except json.JSONDecodeError:
        metadata = None
    if not isinstance(metadata, dict):
        raise BuildError(
            f"{node}: its metadata is {node.layer.metadata!r}, expected JSON such as {{'op': 'ALL_REDUCE'}}"
        )
    return metadata


def _last_uses(nodes: list[Node], outputs: set[str]) -> list[list[str]]:
    """After each node, the tensors that no later one reads."""
    done: list[list[str]] = []
    kept = set(outputs)
    for node in reversed(nodes):
        names = {name for name in node.inputs if name is not None} | {output.name for output in node.outputs}
        done.append(sorted(names - kept))
        kept |= names
    return done[::-1]


def _write_back(outputs: Mapping[str, Array], feeds: Mapping[str, Array]) -> None:
    """On the GPU a pool and its output share their memory; a scatter's output here is an array of its own."""
    for name, values in outputs.items():
        pool = feeds.get(name.replace(_OUT, ".")) if _OUT in name else None
        if pool is not None and not np.may_share_memory(pool, values):
            pool[...] = values if pool.dtype == values.dtype else values.view(pool.dtype)
