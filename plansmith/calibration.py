"""What calibration needs from the packages above quantize, put together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import builder
import quantize
from plansmith.console import Console, human_bytes
from plansmith.fingerprint import code_fingerprint, library_versions
from plansmith.precision_table import choice_table
from plansmith_errors import ConfigError, QuantizeError


def calibration_settings(
    recipe: quantize.Recipe, override: quantize.CalibrationSettings | None
) -> quantize.CalibrationSettings:
    """Those of the build file, or the recipe's. Raises ConfigError where a recipe would ignore them."""
    if override is not None and not recipe.needs_text:
        raise ConfigError(
            f"quantize.calibration: recipe {recipe.name!r} is not calibrated; choose one that is, such as int4-awq or "
            "int8-sq, or leave the section out"
        )
    return override or recipe.calibration or quantize.CalibrationSettings()


def calibration_tools(
    recipe: quantize.Recipe, override: quantize.CalibrationSettings | None, console: Console
) -> quantize.CalibrationTools | None:
    """None for a recipe that needs none. Raises ConfigError."""
    settings = calibration_settings(recipe, override)
    if not recipe.needs_text and recipe.auto is None:
        return None

    def announce(cost: quantize.CostEstimate) -> None:
        disk = f", {human_bytes(cost.disk_bytes)} of disk" if cost.disk_bytes else ""
        console.info(
            f"quantize: {cost.purpose} on {cost.num_samples} x {cost.sequence_length} tokens: {cost.flops / 1e12:.1f} "
            f"TFLOP, about {cost.seconds:.0f} s on this machine, {human_bytes(cost.ram_bytes)} of memory{disk}"
        )

    def show(choice: quantize.ChoiceRecord) -> None:
        console.info(choice_table(choice))

    return quantize.CalibrationTools(builder.calibration_runner, _render_chat, settings, announce, show)


def quantize_dependencies(
    recipe: quantize.Recipe, override: quantize.CalibrationSettings | None, source: object
) -> dict[str, object]:
    """What the bytes of a quantized checkpoint depend on; ``source`` tells its files from all others.

    Raises ConfigError, and QuantizeError when the calibration text cannot be read.
    """
    return {
        "source": source,
        "recipe": recipe.model_dump(mode="json", exclude={"calibration"}),
        "code": code_fingerprint("quantize"),
        "libraries": library_versions("numpy", "ml_dtypes", "gguf", "tokenizers"),
        **calibration_dependencies(recipe, override),
    }


def calibration_dependencies(
    recipe: quantize.Recipe, override: quantize.CalibrationSettings | None
) -> dict[str, object]:
    """What the result of a calibrated recipe depends on beyond source and recipe; empty for the others.

    Raises ConfigError, and QuantizeError when the text cannot be read.
    """
    settings = calibration_settings(recipe, override)
    if not recipe.needs_text:
        return {}
    text = quantize.calibration_file(settings.text)
    return {
        "calibration": settings.model_dump(mode="json", exclude={"text", "max_seconds", "max_activation_gb"}),
        "calibration_text": {text.name: quantize.text_sha256(text)},
        "calibration_code": code_fingerprint("builder"),
        "calibration_libraries": library_versions("torch"),
    }


def _render_chat(checkpoint: quantize.Checkpoint, messages: Sequence[Mapping[str, Any]]) -> str:
    from triton_repo import render_chat

    template = checkpoint.chat_template
    if template is None:
        raise QuantizeError(
            f"{checkpoint.path}: the model has no chat template for the chat turns of the calibration text; "
            'give lines of {"text": "..."}'
        )
    return render_chat(template, messages, add_generation_prompt=False, **_special_tokens(checkpoint))


def _special_tokens(checkpoint: quantize.Checkpoint) -> dict[str, str]:
    from quantize.checkpoint import parse_json_object

    data = checkpoint.side_files().get("tokenizer_config.json", b"{}")
    config = parse_json_object(data, f"{checkpoint.path}: tokenizer_config.json")
    found = {}
    for key in ("bos_token", "eos_token"):
        token = config.get(key)
        content = token.get("content") if isinstance(token, dict) else token
        found[key] = content if isinstance(content, str) else ""
    return found
