"""The report of a comparison: what an engine gives away against another, and what each weight became."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import builder
import quantize
from plansmith.config import VerifySection
from plansmith.console import Progress
from plansmith.verify.inputs import Inputs
from plugins.inflight_batching.step import StepEngine
from quantize import StoredWeight


def measure(
    engine: StepEngine,
    baseline: StepEngine,
    inputs: Inputs,
    section: VerifySection,
    progress: Progress,
) -> dict[str, Any]:
    """Both engines on everything that ``section`` asks for; the keys are described in docs/evaluate.md.

    Raises EngineError when an input does not fit an engine.
    """
    report: dict[str, Any] = {}
    if section.perplexity is not None:
        check = section.perplexity
        compared = builder.compare_engines(
            engine,
            baseline,
            inputs.token_ids,
            window=check.window,
            max_windows=check.max_windows,
            progress=progress,
        )
        report["perplexity"] = {
            "quantized": _perplexity(compared.perplexity),
            "unquantized": _perplexity(compared.baseline_perplexity),
            "text": check.text.name,
            "window": check.window,
        }
        report["divergence"] = {
            "kl_per_token": compared.kl_per_token,
            "top1_agreement": compared.top1_agreement,
            "mean_logit_error": compared.mean_logit_error,
            "max_logit_error": compared.max_logit_error,
            "num_positions": compared.perplexity.num_scored,
        }
    if section.choices is not None:
        answered = [_answers(each, inputs, progress) for each in (engine, baseline)]
        report["choices"] = {
            "quantized": answered[0],
            "unquantized": answered[1],
            "questions": section.choices.questions.name,
            "num_questions": len(inputs.questions),
        }
    return report


def describe_weights(weights: list[StoredWeight]) -> dict[str, Any]:
    """The report's ``schemes`` and ``weights``; both lists are empty for a model that is not quantized."""
    return {
        "schemes": [
            {**asdict(total), "bits_per_weight": total.bits_per_weight} for total in quantize.scheme_totals(weights)
        ],
        "weights": [
            {**asdict(weight), "kind": weight.kind, "bits_per_weight": weight.bits_per_weight} for weight in weights
        ],
    }


def _perplexity(measured: builder.Perplexity) -> dict[str, Any]:
    return {"perplexity": measured.perplexity, "num_scored": measured.num_scored}


def _answers(engine: StepEngine, inputs: Inputs, progress: Progress) -> dict[str, float]:
    answered = builder.multiple_choice(engine, inputs.encode, inputs.questions, progress)
    return {"acc": answered.acc, "acc_stderr": answered.acc_stderr, "acc_norm": answered.acc_norm}
