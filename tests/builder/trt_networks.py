"""Small TensorRT networks, built without a GPU and run by the interpreter."""

from types import SimpleNamespace

import numpy as np
import tensorrt_rtx as trt

from builder.network.interpreter import Interpreter


class Silent(trt.ILogger):
    """Keeps what TensorRT says."""

    def __init__(self):
        trt.ILogger.__init__(self)
        self.errors = []

    def log(self, severity, message):
        if severity <= trt.ILogger.Severity.ERROR:
            self.errors.append(message)


class Net:
    """A network under construction; ``payloads`` as a target keeps them."""

    def __init__(self):
        self.logger = Silent()
        self.builder = trt.Builder(self.logger)
        self.network = self.builder.create_network(0)
        self.payloads = {}
        self._alive = []

    def input(self, name, dtype, shape):
        return self.network.add_input(name, dtype, shape)

    def constant(self, values, name=None):
        values = np.array(values, order="C")
        self._alive.append(values)
        layer = self.network.add_constant(values.shape, trt.Weights(values))
        layer.name = name or layer.name
        return layer.get_output(0)

    def raw(self, dtype, shape, values, kind, name):
        """A constant of a type that NumPy does not have; ``values``: its bytes."""
        self._alive.append(values)
        layer = self.network.add_constant(shape, trt.Weights(dtype, values.ctypes.data, int(np.prod(shape))))
        layer.name = name
        self.payloads[name] = SimpleNamespace(dtype=kind, shape=tuple(shape), array=values)
        return layer.get_output(0)

    def output(self, layer, index=0, name="y"):
        tensor = layer.get_output(index)
        tensor.name = name
        self.network.mark_output(tensor)

    def interpreter(self, collective=None, **options):
        return Interpreter(trt, self.network, self.payloads, collective, **options)

    def run(self, **feeds):
        outputs = self.interpreter().run(feeds)
        return outputs["y"] if len(outputs) == 1 else outputs
