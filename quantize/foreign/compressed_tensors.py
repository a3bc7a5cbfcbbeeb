"""compressed-tensors (llm-compressor): pack-, int-, float-, nvfp4-pack-, mxfp4-pack- and mxfp8-quantized weights.

https://github.com/vllm-project/compressed-tensors, compressors/, version 0.20. A module's tensors say which of these it
is; the configuration must describe the same. nvfp4's scale of the tensor is stored as its reciprocal.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from plansmith_errors import CheckpointError
from quantize.foreign.bits import num_words
from quantize.foreign.float_weight import read_blocks, read_fp8
from quantize.foreign.group_index import group_index
from quantize.foreign.layout import Layout, read_block, shorten
from quantize.foreign.packed_weight import PackedWeight
from quantize.foreign.parts import SCALE_FLOATS, Module, Part
from quantize.foreign.rows_of_integers import RowsOfIntegers

_FORMATS = (
    None,
    "dense",
    "pack-quantized",
    "int-quantized",
    "float-quantized",
    "naive-quantized",
    "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
    "mxfp8-quantized",
    "mixed-precision",
)
_INT8 = ("int8",)


class CompressedTensorsLayout(Layout):
    name = "compressed-tensors"

    def __init__(self, source: str, config: Mapping[str, Any]) -> None:
        self.choice(source, config, "format", _FORMATS)
        _refuse_transforms(source, config)
        groups = config.get("config_groups")
        if not isinstance(groups, dict) or not groups:
            raise CheckpointError(f"{source}: config_groups is {shorten(groups)}, expected a mapping of groups")
        self._groups = [_weights_of(source, name, group) for name, group in groups.items()]
        sizes = next((group["block_structure"] for group in self._groups if group.get("block_structure")), None)
        self._block = None if sizes is None else read_block(f"{source}: block_structure", sizes)

    def weight(self, module: Module) -> PackedWeight | None:
        if "weight_packed" in module:
            return self._packed(module)
        if "weight_scale" not in module:
            return None
        if module.dtype("weight") == "int8":
            return self._integers(module)
        if module.dtype("weight_scale") == "uint8":
            self._described(module, 8, "float")
            return read_blocks(module, "mxfp8", "weight")
        weight = read_fp8(module, block=self._block)
        self._described(module, 8, "float")
        return weight

    def _packed(self, module: Module) -> PackedWeight:
        if module.dtype("weight_packed") == "int32":
            return self._packed_integers(module)
        group = self._described(module, 4, "float")
        if "weight_global_scale" in module:
            return read_blocks(module, "nvfp4", "weight_packed", "weight_global_scale", is_divisor=True)
        if group.get("group_size") != 32:
            raise module.refused(f"has no weight_global_scale, though its group_size is {group.get('group_size')!r}")
        return read_blocks(module, "mxfp4", "weight_packed")

    def _packed_integers(self, module: Module) -> PackedWeight:
        packed = module.part("weight_packed", ("int32",))
        shape_part = module.part("weight_shape", ("int64", "int32"), (2,))
        rows, columns = (int(size) for size in shape_part.load())
        bits = next((bits for bits in self._int_bits() if packed.shape == (rows, num_words(columns, bits))), None)
        if bits is None or columns <= 0:
            raise module.refused(
                f"has weight_packed {list(packed.shape)} and weight_shape {[rows, columns]}, which do not fit "
                f"{' or '.join(map(str, self._int_bits())) or 'no'} bits; get the checkpoint again"
            )
        self._described(module, bits, "int")
        return _integers(module, packed, (rows, columns), bits, (shape_part,))

    def _integers(self, module: Module) -> PackedWeight:
        stored = module.part("weight", _INT8)
        self._described(module, 8, "int")
        return _integers(module, stored, (stored.shape[0], stored.shape[1]), 8)

    def _int_bits(self) -> list[int]:
        found = {group["num_bits"] for group in self._groups if group.get("type", "int") == "int"}
        return sorted(bits for bits in found if type(bits) is int and 1 <= bits <= 8)

    def _described(self, module: Module, bits: int, kind: str) -> Mapping[str, Any]:
        """A group of the configuration that a module of these weights can belong to."""
        for group in self._groups:
            if group["num_bits"] == bits and group.get("type", "int") == kind:
                return group
        raise module.refused(
            f"is stored in {bits} bits of type {kind}, which no group of quantization_config describes"
        )


def _integers(
    module: Module, stored: Part, shape: tuple[int, int], bits: int, others: tuple[Part, ...] = ()
) -> PackedWeight:
    rows, columns = shape
    groups = _num_groups(module, rows, columns)
    scales = module.part("weight_scale", SCALE_FLOATS, *_scale_shapes(rows, groups))
    zeros = None
    if "weight_zero_point" in module:
        is_packed = module.dtype("weight_zero_point") == "int32"
        shapes = [(num_words(rows, bits), groups)] if is_packed else _scale_shapes(rows, groups)
        zeros = module.part("weight_zero_point", ("int32",) if is_packed else _INT8, *shapes)
    g_idx = module.optional("weight_g_idx", ("int32", "int64"), (columns,))
    group_size = columns // groups
    index = None if g_idx is None else group_index(module, g_idx, group_size, groups, unset=True)
    return RowsOfIntegers(
        shape, stored, scales, zeros, bits=bits, group_size=group_size, others=(*others, g_idx), group_index=index
    )


def _num_groups(module: Module, rows: int, columns: int) -> int:
    scales = module.shape("weight_scale")
    groups = scales[1] if len(scales) == 2 else 1
    if groups < 1 or columns % groups:
        raise module.refused(f"has {columns} columns and {groups} scales in a row, which do not divide them")
    return groups


def _scale_shapes(rows: int, groups: int) -> list[tuple[int, ...]]:
    return [(rows, groups)] if groups > 1 else [(rows, 1), (rows,), (1,), (), (1, 1)]


def _weights_of(source: str, name: str, group: Any) -> Mapping[str, Any]:
    weights = group.get("weights") if isinstance(group, dict) else None
    if not isinstance(weights, dict) or type(weights.get("num_bits")) is not int:
        raise CheckpointError(f"{source}: config_groups.{name} is {shorten(group)}, expected weights with num_bits")
    return weights


def _refuse_transforms(source: str, config: Mapping[str, Any]) -> None:
    sparsity, transforms = config.get("sparsity_config"), config.get("transform_config")
    if isinstance(sparsity, dict) and sparsity.get("format") not in (None, "dense"):
        raise CheckpointError(
            f"{source}: weights are sparse ({shorten(sparsity.get('format'))}), expected dense ones; "
            "quantize the original model"
        )
    if isinstance(transforms, dict) and transforms.get("config_groups"):
        raise CheckpointError(
            f"{source}: has a transform_config, whose rotations run beside the weights; quantize the original model"
        )
