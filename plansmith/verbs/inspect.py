"""``plansmith inspect``: what is this?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from plansmith.console import Console, human_bytes
from plansmith.options import current_options, global_options
from plansmith.precision_table import choice_table
from plansmith.verify.text import scheme_table
from quantize import read_choice

_PROOF = ("schemes", "weights")  # of a quantized checkpoint; a reader is given a table of the first


@click.command()
@click.argument("path", type=click.Path(path_type=Path))
@global_options
def command(path: Path) -> None:
    """Say what PATH is: a build file, a checkpoint, an engine or a model repository."""
    data = _describe(path)
    Console.current().result(data, _as_text(data, path))


def _as_text(data: dict[str, Any], path: Path) -> str:
    hidden = _PROOF if "schemes" in data else ("gpu",)
    lines = [f"{key}: {_short(value)}" for key, value in data.items() if key not in hidden]
    if data.get("schemes"):
        lines += ["", scheme_table(data["schemes"])]
    if data["kind"] == "engine":
        lines += _gpu_lines(path)
    if data["kind"] == "quantized checkpoint":
        lines += _choice_lines(data["quantization"], str(path))
    return "\n".join(lines)


def _gpu_lines(path: Path) -> list[str]:
    """Of an engine for GPUs: its plans, which nothing but a GPU can open."""
    from builder import read_manifest
    from plansmith.engine_text import engine_lines

    manifest = read_manifest(path)
    return [] if manifest.gpu is None else ["", *engine_lines(manifest, manifest.gpu)]


def _choice_lines(quantization: dict[str, Any], source: str) -> list[str]:
    """Of a checkpoint whose precision was chosen automatically."""
    choice = read_choice(quantization, source)
    return [] if choice is None else ["", choice_table(choice)]


def _describe(path: Path) -> dict[str, Any]:
    if path.suffix in (".yaml", ".yml"):
        return _build_file(path)
    if (path / "engine.json").is_file():
        return _engine(path)
    if path.is_dir() and next(path.glob("*/config.pbtxt"), None) is not None:
        return _repository(path)
    return _checkpoint(path)


def _build_file(path: Path) -> dict[str, Any]:
    from plansmith.config import load_build_file

    return {"kind": "build file", **load_build_file(path, current_options().settings).model_dump(mode="json")}


def _engine(path: Path) -> dict[str, Any]:
    from builder import read_manifest

    return {"kind": "engine", **read_manifest(path).as_data()}


def _repository(path: Path) -> dict[str, Any]:
    from triton_repo import check_repository

    repository = check_repository(path)
    return {
        "kind": "model repository",
        "model_name": repository.model_name,
        "plansmith_version": repository.plansmith_version,
        "engine": _engine(repository.engine),
    }


def _checkpoint(path: Path) -> dict[str, Any]:
    from plansmith.verify.measure import describe_weights
    from quantize import checkpoint_weights, open_checkpoint

    checkpoint = open_checkpoint(path)
    tensors = [{"name": t.name, "dtype": t.dtype, "shape": list(t.shape), "bytes": t.nbytes} for t in checkpoint]
    quantization = checkpoint.config.get("quantization_config")
    return {
        "kind": "checkpoint" if quantization is None else "quantized checkpoint",
        "origin": checkpoint.origin,
        "architecture": checkpoint.config.get("model_type"),
        "num_tensors": len(tensors),
        "size": human_bytes(sum(tensor.nbytes for tensor in checkpoint)),
        "has_chat_template": checkpoint.chat_template is not None,
        "quantization": quantization,
        "tensors": tensors,
        **_uncalibrated_experts(quantization),
        **describe_weights(checkpoint_weights(checkpoint)),
    }


def _uncalibrated_experts(quantization: Any) -> dict[str, Any]:
    """Experts that saw too few tokens in calibration; nothing where there are none."""
    calibration = quantization.get("calibration") if isinstance(quantization, dict) else None
    experts = calibration.get("uncalibrated_experts") if isinstance(calibration, dict) else None
    if not isinstance(experts, list) or not experts:
        return {}
    return {"num_uncalibrated_experts": len(experts), "uncalibrated_experts": experts}


def _short(value: Any, longest: int = 160) -> str:
    """One line for a reader; --output json has everything."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= longest else f"{text[:longest]}... (all of it with --output json)"
