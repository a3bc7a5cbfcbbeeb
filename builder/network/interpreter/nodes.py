"""The layers of an INetworkDefinition, read once: names, kinds, inputs and what each output is declared to be."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from builder.network.interpreter.values import DTYPE_NAMES
from plansmith_errors import BuildError


@dataclass(frozen=True)
class Declared:
    """What a network says of a tensor; -1 stands for a size that is known when it runs."""

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Node:
    name: str
    kind: str  # member of LayerType
    layer: Any  # the layer as its own class, so that its parameters can be read
    inputs: tuple[str | None, ...]  # None: an optional input that is not set
    outputs: tuple[Declared, ...]

    def __str__(self) -> str:
        return f"layer {self.name!r} ({self.kind})"


def read_nodes(trt: Any, network: Any, interfaces: Mapping[str, str]) -> list[Node]:
    """All layers, each after those whose outputs it reads. ``interfaces``: class name in ``trt`` by kind of layer.

    Raises BuildError for a kind that is not in ``interfaces``, and where layers read each other in a circle.
    """
    nodes = [_read_node(trt, network.get_layer(index), interfaces) for index in range(network.num_layers)]
    return _in_order(nodes)


def declared(tensor: Any) -> Declared:
    """Raises BuildError where TensorRT finds no shape: a layer before it was given what does not fit."""
    try:
        shape = tuple(tensor.shape)
    except RuntimeError as error:
        raise BuildError(f"TensorRT finds no shape for {tensor.name!r} ({error}); its log names the layer") from None
    return Declared(tensor.name, DTYPE_NAMES[tensor.dtype.name], shape)


def _read_node(trt: Any, layer: Any, interfaces: Mapping[str, str]) -> Node:
    kind = layer.type.name
    if kind not in interfaces:
        raise BuildError(
            f"layer {layer.name!r} is of type {kind}, which the interpreter does not know; it knows: "
            f"{', '.join(sorted(kind.lower() for kind in interfaces))}"
        )
    inputs = tuple(_name(layer.get_input(index)) for index in range(layer.num_inputs))
    outputs = tuple(declared(layer.get_output(index)) for index in range(layer.num_outputs))
    name = layer.name
    # get_layer gives the base class, whose attributes some subclasses hide (IActivationLayer.type): they come first.
    layer.__class__ = getattr(trt, interfaces[kind])
    return Node(name, kind, layer, inputs, outputs)


def _name(tensor: Any) -> str | None:
    return None if tensor is None else str(tensor.name)


def _in_order(nodes: list[Node]) -> list[Node]:
    # The order of addition, but for inputs that were set to the output of a layer that was added later.
    makers = {output.name: node for node in nodes for output in node.outputs}
    ordered: dict[str, Node] = {}
    open_names: set[str] = set()
    stack = [(node, False) for node in reversed(nodes)]
    while stack:
        node, inputs_done = stack.pop()
        if inputs_done:
            open_names.discard(node.name)
            ordered.setdefault(node.name, node)
        elif node.name not in ordered:
            if node.name in open_names:
                raise BuildError(f"{node} reads what is computed from its own output")
            open_names.add(node.name)
            stack.append((node, True))
            needed = [makers[name] for name in node.inputs if name in makers]
            stack += [(maker, False) for maker in reversed(needed) if maker.name not in ordered]
    return list(ordered.values())
