"""How one mode's plan is put on the stream: kernel by kernel, or as a CUDA graph that was recorded before."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from builder.targets.tensorrt.runtime.gpu import Device, ExecutionContext
from plansmith_errors import EngineError

Shapes = Mapping[str, tuple[int, ...]]
MakeContext = Callable[[], ExecutionContext]
"""A new context with every address bound."""

_MAX_GRAPHS = 32  # each has a context of its own, because a graph is valid for the shapes of its context alone


class Launcher(Protocol):
    def launch(self, shapes: Shapes) -> None:
        """Put one step with these input shapes on the stream. Raises EngineError."""
        ...


class DirectLauncher:
    def __init__(self, device: Device, make_context: MakeContext) -> None:
        self._device = device
        self._context = make_context()
        self._shapes: dict[str, tuple[int, ...]] = {}

    def launch(self, shapes: Shapes) -> None:
        set_shapes(self._context, shapes, self._shapes)
        execute(self._context, self._device.stream)


class GraphLauncher:
    """Decode steps come in few shapes, again and again: each is recorded when it comes the second time.

    The first time it runs as it is, which also lets TensorRT do what it does once for new shapes, outside a graph.
    """

    def __init__(self, device: Device, make_context: MakeContext, max_graphs: int = _MAX_GRAPHS) -> None:
        self._device = device
        self._make_context = make_context
        self._max_graphs = max_graphs
        self._direct = DirectLauncher(device, make_context)
        self._seen: OrderedDict[Any, Any] = OrderedDict()  # shapes -> (graph, its context), or None after one step

    def launch(self, shapes: Shapes) -> None:
        key = tuple(sorted(shapes.items()))
        if key not in self._seen:
            self._seen[key] = None
            if len(self._seen) > self._max_graphs:
                self._seen.popitem(last=False)
            self._direct.launch(shapes)
            return
        if self._seen[key] is None:
            self._seen[key] = self._record(shapes)
        self._seen.move_to_end(key)
        self._device.launch(self._seen[key][0])

    def _record(self, shapes: Shapes) -> tuple[Any, ExecutionContext]:
        context = self._make_context()
        set_shapes(context, shapes, {})
        execute(context, self._device.stream)  # kernels load on their first run, which a graph cannot hold
        self._device.synchronize()
        return self._device.capture(lambda: execute(context, self._device.stream)), context


def set_shapes(context: ExecutionContext, shapes: Shapes, known: dict[str, tuple[int, ...]]) -> None:
    """Those that differ from ``known``, which is brought up to date."""
    for name, shape in shapes.items():
        if known.get(name) == shape:
            continue
        if not context.set_input_shape(name, shape):
            raise EngineError(f"the plan takes no {name} of shape {list(shape)}; build it with larger limits")
        known[name] = shape


def execute(context: ExecutionContext, stream: int) -> None:
    if not context.execute_async_v3(stream):
        raise EngineError("TensorRT could not run the step; its log has the reason")
