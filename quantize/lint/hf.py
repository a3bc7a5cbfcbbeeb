"""Lint of a directory with Hugging Face names: original models, the neutral format, compressed-tensors, ModelOpt."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quantize.activations import input_scale_name, kv_scale_name, pre_quant_scale_name
from quantize.architectures import role_of
from quantize.checkpoint import Checkpoint
from quantize.dtypes import SOURCE_FLOATS
from quantize.export.scheme import LinearScheme
from quantize.foreign.split import PackedCheckpoint
from quantize.lint.finding import Expected, Finding, compare
from quantize.lint.hf_scheme import HfScheme, read_scheme
from quantize.lint.parts import GROUPED, neutral_parts, plain
from quantize.model_shape import LM_HEAD, ModelShape
from quantize.split_projections import has_fused_projections


def lint_hf(checkpoint: Checkpoint) -> list[Finding]:
    """Every tensor that config.json implies, against the headers. Raises CheckpointError for an unreadable config."""
    shape, scheme = shape_of(checkpoint), read_scheme(checkpoint)
    findings = _group_findings(shape, scheme)
    if findings:
        return findings
    stored = {info.name: info for info in checkpoint if role_of(info.name) != "derived"}
    expected = expected_tensors(shape, scheme)
    if _is_gguf(checkpoint):  # its types are ggml's; the reader dequantizes them
        stored_dtypes = tuple({info.dtype for info in checkpoint})
        expected = {
            name: Expected(stored_dtypes, wanted.shape, wanted.is_required) for name, wanted in expected.items()
        }
    if isinstance(checkpoint, PackedCheckpoint):  # it has read the parts of each packed weight by their rules
        packed = {name: checkpoint.packed(name) for name in expected}
        expected = {
            name: wanted if (weight := packed[name]) is None else replace(wanted, dtypes=(weight.kind,))
            for name, wanted in expected.items()
        }
    return compare(expected, stored)


def shape_of(checkpoint: Checkpoint) -> ModelShape:
    """The model that config.json describes, with ``tie_word_embeddings`` made explicit."""
    config: dict[str, Any] = {**checkpoint.config, "tie_word_embeddings": checkpoint.is_tied}
    shape = ModelShape.from_config(config, f"{checkpoint.path}: config.json")
    is_fused = has_fused_projections(config) and any(".qkv_proj." in name for name in checkpoint.names())
    return replace(shape, is_fused=is_fused)


def expected_tensors(shape: ModelShape, scheme: HfScheme) -> dict[str, Expected]:
    """Every tensor of the model as ``scheme`` stores it, by name."""
    expected: dict[str, Expected] = {}
    for name, size in shape.other_tensors():
        expected |= _stored(name, size, scheme)
    for name, linear in shape.linear_weights():
        expected |= _stored(name, (linear.out_features, linear.in_features), scheme)
        expected |= _companions(name, linear.in_features, scheme)
        if scheme.allows_pre_quant_scale:
            module = name.removesuffix(".weight")
            expected[f"{module}.pre_quant_scale"] = Expected(SOURCE_FLOATS, (linear.in_features,), is_required=False)
    if shape.is_tied:  # some writers store the head again
        expected[LM_HEAD] = Expected(SOURCE_FLOATS, (shape.vocab_size, shape.hidden_size), is_required=False)
    return expected


def _companions(name: str, num_inputs: int, scheme: HfScheme) -> dict[str, Expected]:
    """What is stored of a linear's inputs, and of keys or values."""
    own, found = scheme.of(name), {}
    if scheme.parts is not neutral_parts:  # the layouts of others have the inputs' among the parts
        return _kv_scale(name, scheme)
    if own.activations is not None and own.activations.scale == "static":
        found[input_scale_name(name)] = Expected(("float32",), (), is_scale=True)
    if own.has_pre_quant_scale:
        found[pre_quant_scale_name(name)] = Expected(("float32",), (num_inputs,), is_scale=True)
    return found | _kv_scale(name, scheme)


def _kv_scale(name: str, scheme: HfScheme) -> dict[str, Expected]:
    scale = kv_scale_name(name)
    if scale is None or not scheme.has_kv_scales:
        return {}
    if scheme.kv_in_linear:
        return {scale: Expected(("float32",), (), is_scale=True)}
    module, _, kind = scale.rpartition(".")
    return {f"{module.rpartition('.')[0]}.{kind}": Expected(("bfloat16", "float16", "float32"), (1,), is_scale=True)}


def _stored(name: str, size: tuple[int, ...], scheme: HfScheme) -> dict[str, Expected]:
    own = scheme.of(name)
    if len(size) != 2 or own.name == "none":
        return {name: Expected(SOURCE_FLOATS, size)} if len(size) != 2 else {name: plain(*size)[""]}
    module = name.removesuffix(".weight")
    parts = scheme.parts(own, *size)
    return {(module if part.startswith(".") else name) + part: expected for part, expected in parts.items()}


def _group_findings(shape: ModelShape, scheme: HfScheme) -> list[Finding]:
    """Groups that do not divide a layer's inputs: no shape can be derived for such a layer."""
    findings = []
    for name, linear in shape.linear_weights():
        own: LinearScheme = scheme.of(name)
        group = own.group_size
        if own.name in GROUPED and (type(group) is not int or group <= 0 or linear.in_features % group):
            findings.append(
                Finding("config", name, f"has {linear.in_features} inputs, which groups of {group!r} do not divide")
            )
    return findings


def _is_gguf(checkpoint: Checkpoint) -> bool:
    return checkpoint.path.is_file()
