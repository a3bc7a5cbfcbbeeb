"""Lint any checkpoint that can be told apart by its config.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from quantize.checkpoint import Checkpoint, open_checkpoint, parse_json_object
from quantize.foreign.recognize import dequantized
from quantize.foreign.split import PackedCheckpoint
from quantize.lint.finding import Finding
from quantize.lint.hf import expected_tensors, lint_hf, shape_of
from quantize.lint.hf_scheme import is_known, read_scheme
from quantize.lint.unified import expected_of_rank, lint_unified, open_rank
from quantize.lint.unified_config import UnifiedConfig, read_unified_config
from quantize.lint.values import value_findings
from quantize.parallel import Mapping, legal_advice, problems_of


def lint_checkpoint(
    path: Path, *, tp_size: int | None = None, pp_size: int | None = None, check_values: bool = False
) -> list[Finding]:
    """Everything that config.json implies, against the headers; with ``check_values`` every value is read as well.

    ``tp_size``, ``pp_size``: whether the model can be cut like this (a unified checkpoint: whether it is). Raises
    CheckpointError for what cannot be read at all.
    """
    config = _unified_json(path)
    if config is not None:
        unified = read_unified_config(config, f"{path}: config.json", _quantized_layers(path))
        findings = lint_unified(path, config, unified) + _mapping_findings(unified.mapping, tp_size, pp_size)
        return findings + (_unified_values(path, unified) if check_values and not _blocked(findings) else [])
    checkpoint = _open(path)
    findings = lint_hf(checkpoint) + _shard_findings(checkpoint, tp_size, pp_size)
    return findings + (_values(checkpoint) if check_values and not _blocked(findings) else [])


def _open(path: Path) -> Checkpoint:
    """As it is stored where the linter knows the layout; else as the plain model that it stands for."""
    checkpoint = open_checkpoint(path)
    return checkpoint if is_known(checkpoint) else dequantized(checkpoint)


def _unified_json(path: Path) -> dict[str, Any] | None:
    """config.json of a unified checkpoint; None for another kind."""
    file = path / "config.json"
    if not file.is_file():
        return None
    config = parse_json_object(file.read_bytes(), str(file))
    return config if "architecture" in config and "model_type" not in config else None


def _quantized_layers(path: Path) -> dict[str, Any] | None:
    """quant_cfg.json, which only a mix of schemes needs."""
    file = path / "quant_cfg.json"
    return parse_json_object(file.read_bytes(), str(file)) if file.is_file() else None


def _blocked(findings: list[Finding]) -> bool:
    """Whether the expected tensors could not be derived."""
    return any(finding.kind in ("shard", "config") for finding in findings)


def _mapping_findings(mapping: Mapping, tp_size: int | None, pp_size: int | None) -> list[Finding]:
    wanted = {"mapping.tp_size": (mapping.tp_size, tp_size), "mapping.pp_size": (mapping.pp_size, pp_size)}
    return [
        Finding("shard", key, f"is {found}, asked for {asked}; export again with that cut")
        for key, (found, asked) in wanted.items()
        if asked is not None and asked != found
    ]


def _shard_findings(checkpoint: Checkpoint, tp_size: int | None, pp_size: int | None) -> list[Finding]:
    if tp_size is None and pp_size is None:
        return []
    shape, scheme = shape_of(checkpoint), read_scheme(checkpoint)
    own = [scheme.of(name) for name, _ in shape.linear_weights()]
    # The coarsest decides; only INT4 has kernels that are particular about it.
    groups = [found.group_size for found in own if found.name == "int4"]
    group = max((size for size in groups if type(size) is int), default=0) or None  # junk is a finding of its own
    if isinstance(checkpoint, PackedCheckpoint):
        group = checkpoint.largest_int4_group
    problems = problems_of(shape, Mapping(tp_size or 1, pp_size or 1), group)
    return [Finding("shard", "mapping", f"{problem}; {legal_advice(shape, group)}") for problem in problems]


def _values(checkpoint: Checkpoint) -> list[Finding]:
    expected = expected_tensors(shape_of(checkpoint), read_scheme(checkpoint))
    findings = []
    for info in checkpoint:

        def load_rows(begin: int, end: int, name: str = info.name) -> Any:
            return checkpoint.load_rows(name, begin, end)

        findings += value_findings(info.name, info.shape, load_rows, expected.get(info.name))
    return findings


def _unified_values(path: Path, unified: UnifiedConfig) -> list[Finding]:
    findings = []
    shared: dict[tuple[int, str], tuple[int, float]] = {}  # scales of whole modules: the first rank's, by stage
    for rank in range(unified.mapping.world_size):
        file, _ = open_rank(path, rank)
        if file is None:
            continue
        expected = expected_of_rank(unified, rank, file.tensors)
        for name, tensor in file.tensors.items():
            view, wanted = file.view(name), expected.get(name)

            def load_rows(begin: int, end: int, view: Any = view) -> Any:
                return view[begin:end] if view.ndim else view

            findings += value_findings(f"rank{rank}: {name}", tensor.shape, load_rows, wanted)
            if wanted is not None and wanted.is_scale and view.size == 1:
                value = float(view.astype("float32").reshape(())[()])
                first, other = shared.setdefault((rank // unified.mapping.tp_size, name), (rank, value))
                if value > 0 and other > 0 and value != other:
                    message = f"is {value:g}, of rank{first} {other:g}; ranks of one stage have the same"
                    findings.append(Finding("scale", f"rank{rank}: {name}", message))
    return findings
