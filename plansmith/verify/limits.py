"""The limits of the verify section, held against a report."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from plansmith.config import VerifySection
from plansmith_errors import PlansmithError

_NUM_WORST = 3  # weights named in an error; the report has all


class VerificationError(PlansmithError):
    """The artifacts were made, but what was measured passes a limit of the build file."""

    exit_code = 3


def check_report(report: dict[str, Any] | None, section: VerifySection) -> None:
    """Raise VerificationError when a limit is passed: one line of all such limits and of the worst weights."""
    if report is None:
        return
    passed = [*_perplexity(report, section), *_divergence(report, section), *_choices(report, section)]
    if passed:
        raise VerificationError(f"{'; '.join(passed)}{_worst(report)}; choose a finer recipe or raise the limit")


# Every comparison is "not within": a measurement that is not a number passes no limit.


def _perplexity(report: dict[str, Any], section: VerifySection) -> Iterator[str]:
    check = section.perplexity
    if check is None or check.max_increase is None:
        return
    measured = report["perplexity"]
    increase = measured["quantized"]["perplexity"] / measured["unquantized"]["perplexity"]
    if not increase <= check.max_increase:
        yield (
            f"perplexity is x{increase:.3f} of the unquantized model's, verify.perplexity.max_increase allows "
            f"x{check.max_increase}"
        )


def _divergence(report: dict[str, Any], section: VerifySection) -> Iterator[str]:
    if section.kl is not None:
        kl = report["divergence"]["kl_per_token"]
        if not kl <= section.kl.max_mean:
            yield f"KL divergence is {kl:.4g} nats per token, verify.kl.max_mean allows {section.kl.max_mean}"
    if section.top1 is not None:
        agreement = report["divergence"]["top1_agreement"]
        if not agreement >= section.top1.min_agreement:
            yield f"top-1 agreement is {agreement:.4f}, verify.top1.min_agreement asks {section.top1.min_agreement}"


def _choices(report: dict[str, Any], section: VerifySection) -> Iterator[str]:
    check = section.choices
    if check is None or check.min_acc is None:
        return
    acc = report["choices"]["quantized"]["acc"]
    if not acc >= check.min_acc:
        yield f"acc is {acc:.4f}, verify.choices.min_acc asks {check.min_acc}"


def _worst(report: dict[str, Any]) -> str:
    weights = sorted(report.get("weights", []), key=lambda weight: -weight["relative_error"])[:_NUM_WORST]
    names = [f"{w['name']} ({w['scheme']}, {w['relative_error']:.3f})" for w in weights if w["relative_error"] > 0]
    return f"; largest weight errors: {', '.join(names)}" if names else ""
