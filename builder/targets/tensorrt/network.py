"""One rank's network: the decoder over TensorRT's layers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from builder.model_spec import ModelSpec
from builder.network import decoder
from builder.network.weights import DecoderWeights
from builder.parallel import Rank
from builder.targets.tensorrt.attention import PagedAttention
from builder.targets.tensorrt.graph import Graph, Profile
from builder.targets.tensorrt.inputs import StepTensors
from builder.targets.tensorrt.int8_pools import Int8Pools
from builder.targets.tensorrt.kv_pools import FloatPools, KvPools
from builder.targets.tensorrt.legality import check_limits
from builder.targets.tensorrt.ops import TensorRtOps
from builder.targets.tensorrt.options import NetworkOptions, StepMode
from builder.targets.tensorrt.payload import Payload
from builder.targets.tensorrt.scratch_file import ScratchFile
from builder.targets.tensorrt.weights import WeightTensors
from plansmith_errors import BuildError


@dataclass(frozen=True)
class BuiltNetwork:
    """An ``INetworkDefinition`` and what TensorRT does not keep of it.

    TensorRT refers to the arrays of ``payloads``: this object must live until the plan is built.
    """

    graph: Graph
    mode: StepMode
    external: Mapping[str, Payload]  # weights that are network inputs, by the input's name
    schemes: Mapping[str, int]  # how many matrices of each scheme of the checkpoint
    types: frozenset[str]  # that the GPU computes with: the network's dtype, schemes of weights and activations

    @property
    def network(self) -> Any:
        return self.graph.network

    @property
    def builder(self) -> Any:
        return self.graph.builder

    @property
    def payloads(self) -> Mapping[str, Payload]:
        """By the name of the constant layer."""
        return self.graph.payloads

    @property
    def profiles(self) -> Mapping[str, Profile]:
        """Of ``mode``: minimum, optimum and maximum shape of each input whose shape is not fixed."""
        return self.graph.profiles[self.mode]

    def layer_counts(self) -> dict[str, int]:
        """Layers of the network by type, as "MATRIX_MULTIPLY"."""
        kinds = (str(self.network.get_layer(index).type) for index in range(self.network.num_layers))
        return dict(sorted(Counter(kind.rsplit(".", 1)[-1] for kind in kinds).items()))


def build_network(
    trt: Any,
    spec: ModelSpec,
    weights: DecoderWeights,
    rank: Rank,
    options: NetworkOptions,
    mode: StepMode = "mixed",
    on_weight: Callable[[str], None] = lambda name: None,
    scratch: ScratchFile | None = None,
) -> BuiltNetwork:
    """The network of ``rank``. ``spec`` and ``weights`` count as the rank has them; ``scratch`` holds converted ones.

    It is the same for both modes, so that one plan serves them with an optimization profile for each and the weights
    are in it once; ``mode`` is whose ``profiles`` it shows.

    Inputs and outputs are named in ``step_feeds``, ``StepTensors`` and ``FloatPools``; the last stage's output is
    "logits" [num_logits, vocab_size] float32, another's "hidden_out" [num_tokens, hidden_size].
    Raises BuildError for what TensorRT refuses, with its reason.
    """
    check_limits(options)
    graph = Graph(trt, options.dtype)
    is_external = options.weights == "external"
    tensors = WeightTensors(graph, weights, external=is_external, on_weight=on_weight, scratch=scratch)
    step = StepTensors(graph, spec, options)
    pools: KvPools = FloatPools(graph, step)
    if options.kv_dtype == "int8":
        pools = Int8Pools(graph, step, tensors, spec.num_kv_heads, spec.head_dim)
    attention = PagedAttention(graph, step, pools)
    ops = TensorRtOps(graph, spec, tensors, step, attention, rank, options.max_seq_len)
    try:
        result = decoder(ops, spec, rank)
    except RuntimeError:  # a tensor has no shape, because the layer that makes it is wrong
        if graph.log.first_error is None:
            raise
        raise BuildError(f"TensorRT refuses the network: {graph.log.first_error}") from None
    graph.output(result, "logits" if rank.is_last_stage else "hidden_out")
    # Some setters log an error and go on.
    if graph.log.first_error is not None:
        raise BuildError(f"TensorRT refuses the network: {graph.log.first_error}")
    types = frozenset({options.dtype, *tensors.schemes, *tensors.activations})
    return BuiltNetwork(graph, mode, tensors.external, tensors.schemes, types)
