"""A FAKE GPU: NumPy for its memory, the network interpreter for its kernels, sockets for NCCL.

A "plan" is a JSON file that says which network to build; executing a context interprets that network. What is real:
bindings, shapes, addresses, pools, ranks in their own processes. What is not: TensorRT's kernels and CUDA.
"""

from __future__ import annotations

import atexit
import json
import shutil
import tempfile
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from builder.model_spec import ModelSpec
from builder.network.interpreter import Interpreter
from builder.network.weights import WeightSource
from builder.parallel import Parallelism, Rank
from builder.sharding.weights import ShardedWeights, spec_of_rank
from builder.targets.tensorrt.network import build_network
from builder.targets.tensorrt.options import MODES, NetworkOptions
from builder.targets.tensorrt.runtime.layout import EngineLayout, PlanFile
from plansmith_errors import EngineError
from quantize import open_checkpoint

MEMORY = 64 << 20  # bytes that the fake GPU has
_NUMPY = {"HALF": "float16", "FLOAT": "float32", "INT32": "int32", "INT64": "int64", "INT8": "int8", "BOOL": "bool"}


class FakeDevice:
    stream = 1

    def __init__(self):
        self._memory = {}
        self._next = 1 << 20
        self.recorded = None  # launches of a graph that is being captured

    def allocate(self, num_bytes):
        address, self._next = self._next, self._next + num_bytes + 4096
        # Memory that was never written is not zero on a GPU either.
        self._memory[address] = np.random.default_rng(address).integers(0, 255, num_bytes, np.uint8)
        return address

    def free(self, address):
        del self._memory[address]

    def free_bytes(self):
        return MEMORY - sum(block.size for block in self._memory.values())

    def zero(self, address, num_bytes):
        self.bytes_at(address, num_bytes)[:] = 0

    def upload(self, address, values):
        self.bytes_at(address, values.nbytes)[:] = np.ascontiguousarray(values).reshape(-1).view(np.uint8)

    def download(self, values, address):
        values.reshape(-1).view(np.uint8)[:] = self.bytes_at(address, values.nbytes)

    def synchronize(self):
        pass

    def capture(self, work):
        self.recorded = []
        work()
        graph, self.recorded = self.recorded, None
        return graph

    def launch(self, graph):
        for work in graph:
            work()

    def close(self):
        self._memory.clear()

    def bytes_at(self, address, num_bytes):
        block = self._memory[address]
        if num_bytes > block.size:
            raise IndexError(f"{num_bytes} bytes at an address of {block.size}")
        return block[:num_bytes]


class FakeEngine:
    """The names of ICudaEngine over a network that is interpreted."""

    def __init__(self, plan: Path, device: FakeDevice):
        import tensorrt_rtx as trt

        settings = json.loads(plan.read_text())
        checkpoint = open_checkpoint(Path(settings["checkpoint"]))
        spec = ModelSpec.from_hf_config(checkpoint.config)
        rank = Rank(Parallelism(**settings["parallelism"]), settings["rank"])
        weights = ShardedWeights(WeightSource(checkpoint, spec), spec, rank)
        options = NetworkOptions(**{**settings["options"], "sms": tuple(settings["options"]["sms"])})
        self.built = build_network(trt, spec_of_rank(spec, rank), weights, rank, options)
        self.trt, self.device = trt, device
        network = self.built.network
        inputs = [network.get_input(index) for index in range(network.num_inputs)]
        outputs = [network.get_output(index) for index in range(network.num_outputs)]
        self.tensors = {tensor.name: tensor for tensor in inputs + outputs}
        self._inputs = {tensor.name for tensor in inputs}
        self.num_io_tensors = len(self.tensors)

    def get_tensor_name(self, index):
        return list(self.tensors)[index]

    def get_tensor_mode(self, name):
        return self.trt.TensorIOMode.INPUT if name in self._inputs else self.trt.TensorIOMode.OUTPUT

    def get_tensor_dtype(self, name):
        return self.tensors[name].dtype

    def get_tensor_shape(self, name):
        return tuple(self.tensors[name].shape)

    def get_tensor_profile_shape(self, name, profile_index):
        return self.built.graph.profiles[MODES[profile_index]][name]


class FakeExecutionContext:
    """The names of IExecutionContext; a step that is put on the stream runs at once."""

    def __init__(self, engine: FakeEngine):
        self._engine, self._shapes, self._addresses, self._communicator = engine, {}, {}, None
        self._interpreter = None
        self._profile = 0

    def set_optimization_profile_async(self, profile_index, stream):
        self._profile = profile_index
        return True

    def set_input_shape(self, name, shape):
        largest = self._engine.built.graph.profiles[MODES[self._profile]].get(name, ((), (), shape))[2]
        self._shapes[name] = tuple(shape)
        return all(size <= most for size, most in zip(shape, largest, strict=True))

    def set_tensor_address(self, name, memory):
        self._addresses[name] = memory
        return name in self._engine.tensors

    def set_communicator(self, communicator):
        self._communicator = communicator
        return True

    def execute_async_v3(self, stream_handle):
        device, shapes = self._engine.device, dict(self._shapes)
        if device.recorded is not None:
            device.recorded.append(lambda: self._run(shapes))
            return True
        try:
            self._run(shapes)
        except (EOFError, OSError):  # a rank at the other end of a collective is gone
            return False
        return True

    def _run(self, shapes):
        built = self._engine.built
        if self._interpreter is None:
            collective = None if self._communicator is None else self._communicator.collective
            self._interpreter = Interpreter(self._engine.trt, built.network, built.payloads, collective)
        feeds = {name: self._array(name, shapes.get(name)) for name in self._engine._inputs}
        for name, values in self._interpreter.run(feeds).items():
            if "_pool_out." not in name:
                self._array(name, values.shape)[...] = values

    def _array(self, name, shape):
        tensor = self._engine.tensors[name]
        dtype = np.dtype(_NUMPY[str(tensor.dtype).rsplit(".", 1)[-1]])
        shape = tuple(tensor.shape) if shape is None else shape
        data = self._engine.device.bytes_at(self._addresses[name], int(np.prod(shape)) * dtype.itemsize)
        return data.view(dtype).reshape(shape)


class FakeCommunicator:
    """Sockets in a folder: a star for each tensor-parallel group, a pair for each hand-over between stages."""

    def __init__(self, folder: Path, device: FakeDevice, rank: int, tp_size: int):
        self._folder, self._device, self._rank = folder, device, rank
        self._tp_rank, self._tp_size, self._group = rank % tp_size, tp_size, rank // tp_size
        self._peers: dict[int, Connection] = {}
        if tp_size > 1:
            self._join_group()

    @property
    def tensor_parallel(self):
        return self if self._tp_size > 1 else None

    def collective(self, layer_name, metadata, x):
        """Every rank's ``x`` goes to the first of the group, which answers all with what the collective makes of it."""
        if self._tp_rank:
            self._peers[0].send_bytes(np.ascontiguousarray(x).tobytes())
            result = np.frombuffer(self._peers[0].recv_bytes(), x.dtype)
            return result.reshape(_result_shape(metadata, x.shape, self._tp_size)).copy()
        parts = [x]
        for peer in range(1, self._tp_size):
            parts.append(np.frombuffer(self._peers[peer].recv_bytes(), x.dtype).reshape(x.shape))
        if metadata["op"] == "ALL_REDUCE":
            result = np.sum(np.stack(parts).astype(np.float32), axis=0).astype(x.dtype)
        else:
            result = np.concatenate(parts, axis=0)
        for peer in range(1, self._tp_size):
            self._peers[peer].send_bytes(np.ascontiguousarray(result).tobytes())
        return result

    def send(self, address, num_bytes, peer, stream):
        self._pair(peer, listens=True).send_bytes(self._device.bytes_at(address, num_bytes).tobytes())

    def receive(self, address, num_bytes, peer, stream):
        data = np.frombuffer(self._pair(peer, listens=False).recv_bytes(), np.uint8)
        self._device.bytes_at(address, num_bytes)[:] = data

    def close(self):
        for connection in self._peers.values():
            connection.close()

    def _pair(self, peer, *, listens):
        key = 1000 + peer
        if key not in self._peers:
            low, high = sorted((self._rank, peer))
            path = self._folder / f"stage-{low}-{high}"
            self._peers[key] = _listen(path, 1)[0] if listens else _connect(path)
        return self._peers[key]

    def _join_group(self):
        path = self._folder / f"group-{self._group}"
        if self._tp_rank:
            self._peers[0] = _connect(path)
            self._peers[0].send_bytes(bytes([self._tp_rank]))
            return
        for connection in _listen(path, self._tp_size - 1):
            self._peers[connection.recv_bytes()[0]] = connection


def _result_shape(metadata, shape, size):
    return shape if metadata["op"] == "ALL_REDUCE" else (shape[0] * size, *shape[1:])


def _listen(path, count):
    with Listener(str(path), "AF_UNIX", backlog=8) as listener:
        return [listener.accept() for _ in range(count)]


def _connect(path):
    import time

    deadline = time.monotonic() + 20
    while True:
        try:
            return Client(str(path), "AF_UNIX")
        except (FileNotFoundError, ConnectionRefusedError):
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)


class FakeGpu:
    captures_graphs = False

    def __init__(self):
        self.device = FakeDevice()

    def deserialize(self, plan):
        if not plan.read_text().startswith("{"):
            raise EngineError(f"{plan}: TensorRT refuses the plan")
        return FakeEngine(plan, self.device)

    def create_context(self, engine, mode):
        return FakeExecutionContext(engine)

    def new_unique_id(self):
        directory = tempfile.mkdtemp(prefix="fake-nccl-")
        atexit.register(shutil.rmtree, directory, ignore_errors=True)
        return directory.encode()

    def join(self, unique_id, rank, tp_size, world_size):
        return FakeCommunicator(Path(unique_id.decode()), self.device, rank, tp_size)


def open_gpu(target, number):
    return FakeGpu()


def fake_engine(directory: Path, checkpoint: Path, parallelism: Parallelism, options: NetworkOptions) -> EngineLayout:
    """An engine directory whose plans are interpreted."""
    spec = ModelSpec.from_hf_config(open_checkpoint(checkpoint).config)
    plans, weights = [], []
    for rank in parallelism.ranks():
        plan = PlanFile(f"rank{rank.rank}.plan", MODES)
        settings = {"checkpoint": str(checkpoint), "rank": rank.rank, "parallelism": vars(parallelism)}
        (directory / plan.name).write_text(json.dumps(settings | {"options": vars(options)}))
        plans.append((plan,))
        weights.append(())
        if options.weights == "external":
            weights[-1] = (f"rank{rank.rank}.safetensors",)
            external = FakeEngine(directory / plan.name, FakeDevice()).built.external
            save_file({name: payload.array for name, payload in external.items()}, directory / weights[-1][0])
    return EngineLayout(
        target="tensorrt-rtx",
        directory=str(directory),
        plans=tuple(plans),
        weights=tuple(weights),
        devices=tuple(range(parallelism.world_size)),
        parallelism=parallelism,
        max_batch_size=options.max_batch_size,
        max_num_tokens=options.max_num_tokens,
        max_seq_len=options.max_seq_len,
        tokens_per_block=options.tokens_per_block,
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
    )
