"""From an engine directory to a compiled model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from builder.model_spec import ModelSpec
from builder.network.decoder import attention_spec
from builder.targets.cpu.attention import register_stand_in, restore_attention
from plansmith_errors import EngineError

if TYPE_CHECKING:
    from openvino import CompiledModel, Model

MODEL_XML, MODEL_BIN = "model.xml", "model.bin"


@dataclass(frozen=True)
class KvPool:
    """One layer's keys or values: the input's name, element type and shape of a block."""

    name: str
    element_type: Any
    block_shape: tuple[int, ...]
    bytes_per_block: int


def compile_engine(path: Path, spec: ModelSpec, properties: dict[str, str]) -> CompiledModel:
    """Read the IR in ``path`` and compile it. Raises EngineError when OpenVINO refuses."""
    import openvino

    core = openvino.Core()
    register_stand_in(core)
    try:
        model = core.read_model(path / MODEL_XML)
        restore_attention(model, [attention_spec(spec, layer) for layer in range(spec.num_layers)])
        _keep_floats_compressed(model)
        return core.compile_model(model, "CPU", properties)
    except (RuntimeError, KeyError) as error:
        reason = str(error).strip().splitlines()[-1]
        raise EngineError(f"{path}: OpenVINO cannot compile the model ({reason})") from error


def _keep_floats_compressed(model: Model) -> None:
    """Mark float16 weights as compressed; the plugin would otherwise hold a float32 copy of each.

    The mark cannot be written to the IR from Python, but in memory its presence is all that counts.
    """
    for node in model.get_ops():
        if node.get_type_name() == "Convert" and node.input_value(0).get_element_type().to_string() == "f16":
            node.get_rt_info()["decompression_0"] = ""


def kv_pools(compiled: CompiledModel) -> list[KvPool]:
    """The KV pools whose types and layouts the plugin chose for this machine."""
    pools = []
    for port in compiled.inputs:
        name = port.get_any_name()
        if not name.startswith(("key_cache.", "value_cache.")):
            continue
        shape = tuple(dimension.get_length() for dimension in list(port.partial_shape)[1:])
        size = port.element_type.size * _product(shape)
        pools.append(KvPool(name, port.element_type, shape, size))
    return pools


def bytes_per_block(compiled: CompiledModel) -> int:
    """Keys and values of ``TOKENS_PER_BLOCK`` tokens, all layers."""
    return sum(pool.bytes_per_block for pool in kv_pools(compiled))


def _product(shape: tuple[int, ...]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total
