"""Refuses in a moment what a late stage of the pipeline would refuse after all the work."""

from __future__ import annotations

import builder
import quantize
from builder.build_check import check_build
from builder.targets.facts import TARGETS
from plansmith.config import BuildFile
from plansmith.verify.inputs import load_tokenizer, read_text, tokenize_text
from plansmith.verify.questions import read_questions
from plansmith_errors import ConfigError
from quantize import Checkpoint
from quantize.plan import plan_tensors


def check_source(source: Checkpoint, build_file: BuildFile) -> None:
    """Raises PlansmithError when the model, its tokenizer, the limits or what is measured on cannot work."""
    spec = builder.ModelSpec.from_hf_config(source.config)
    check_build(build_file.build, spec, _types(source, build_file))
    max_seq_len = build_file.build.resolved_max_seq_len(spec)
    tokenizer = load_tokenizer(source)
    check = build_file.verify.perplexity
    if check is not None:
        # A beginning is enough for any tokenizer, and quick for a long text.
        tokenize_text(tokenizer, read_text(check)[: check.window * 64], check)
        if check.window > max_seq_len:
            raise ConfigError(
                f"verify.perplexity.window is {check.window} tokens, build.max_seq_len is {max_seq_len}; "
                "lower the window or raise the limit"
            )
    if build_file.verify.choices is not None:
        read_questions(build_file.verify.choices)


def _types(source: Checkpoint, build_file: BuildFile) -> list[str]:
    """Schemes that the recipe gives weights and inputs, for targets that compute them; none where it has yet to choose.

    Raises QuantizeError where the recipe does not fit the model.
    """
    recipe = quantize.load_recipe(build_file.quantize.recipe)
    if not TARGETS[build_file.build.target].is_gpu or recipe.auto is not None:
        return []
    planned = plan_tensors(source, recipe)
    inputs = [tensor.inputs.activations.scheme for tensor in planned if tensor.inputs is not None]
    return list(dict.fromkeys([*(tensor.scheme for tensor in planned), *inputs]))
