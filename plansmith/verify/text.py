"""A report as lines for a reader."""

from __future__ import annotations

from typing import Any

from plansmith.console import human_bytes, table

_NUM_WORST = 5


def summary_lines(report: dict[str, Any]) -> list[str]:
    """One line per measurement, for the end of a run."""
    lines = []
    if "perplexity" in report:
        measured = report["perplexity"]
        quantized, unquantized = measured["quantized"]["perplexity"], measured["unquantized"]["perplexity"]
        lines.append(
            f"perplexity on {measured['text']}: {quantized:.2f} (unquantized, {measured['unquantized_weights']}: "
            f"{unquantized:.2f}; x{quantized / unquantized:.3f})"
        )
        divergence = report["divergence"]
        lines.append(
            f"KL to the unquantized model: {divergence['kl_per_token']:.4f} nats per token; "
            f"top-1 agreement {divergence['top1_agreement']:.1%}"
        )
    if "choices" in report:
        measured = report["choices"]
        ours, theirs = measured["quantized"], measured["unquantized"]
        lines.append(
            f"choices of {measured['questions']}: acc {ours['acc']:.4f}, acc_norm {ours['acc_norm']:.4f} "
            f"(unquantized {theirs['acc']:.4f}, {theirs['acc_norm']:.4f}; {measured['num_questions']} questions)"
        )
    return lines


def measurements_table(report: dict[str, Any]) -> str:
    """All that was measured, the engine's beside the baseline's."""
    return table(["", "engine", "against"], measurement_rows(report))


def measurement_rows(report: dict[str, Any]) -> list[list[str]]:
    """(what, engine's, baseline's); what is measured between the two has one value."""
    rows: list[list[str]] = []
    if "perplexity" in report:
        measured, divergence = report["perplexity"], report["divergence"]
        both = [measured[side]["perplexity"] for side in ("quantized", "unquantized")]
        rows += [
            [f"perplexity on {measured['text']}", *(f"{value:.3f}" for value in both)],
            ["mean KL divergence, nats per token", f"{divergence['kl_per_token']:.5f}", ""],
            ["top-1 agreement", f"{divergence['top1_agreement']:.2%}", ""],
            ["mean error of a logit", f"{divergence['mean_logit_error']:.4f}", ""],
            ["largest error of a logit", f"{divergence['max_logit_error']:.3f}", ""],
        ]
    if "choices" in report:
        measured = report["choices"]
        ours, theirs = measured["quantized"], measured["unquantized"]
        rows += [
            [
                f"acc on {measured['questions']}",
                *(f"{side['acc']:.4f} +/- {side['acc_stderr']:.4f}" for side in (ours, theirs)),
            ],
            [f"acc_norm on {measured['questions']}", f"{ours['acc_norm']:.4f}", f"{theirs['acc_norm']:.4f}"],
        ]
    return rows


def scheme_table(schemes: list[dict[str, Any]]) -> str:
    """What the weights became, in all."""
    headers = ["scheme", "tensors", "stored", "bits per weight", "relative error"]
    return table(headers, scheme_rows(schemes))


def scheme_rows(schemes: list[dict[str, Any]]) -> list[list[str]]:
    return [
        [
            total["kind"],
            str(total["num_tensors"]),
            human_bytes(total["nbytes"]),
            f"{total['bits_per_weight']:.2f}",
            f"{total['relative_error']:.4f}",
        ]
        for total in schemes
    ]


def worst_table(weights: list[dict[str, Any]]) -> str:
    """The weights with the largest errors."""
    worst = sorted(weights, key=lambda weight: -weight["relative_error"])[:_NUM_WORST]
    rows = [[w["name"], w["kind"], f"{w['bits_per_weight']:.2f}", f"{w['relative_error']:.4f}"] for w in worst]
    return table(["largest errors", "scheme", "bits per weight", "relative error"], rows)
