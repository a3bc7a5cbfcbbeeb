"""The limits of the verify section, held against its report."""

from __future__ import annotations

from typing import Any

from plansmith.config import VerifySection
from plansmith_errors import PlansmithError


class VerificationError(PlansmithError):
    """The artifacts were made, but what was measured passes a limit of the build file."""

    exit_code = 3


def check_report(report: dict[str, Any] | None, section: VerifySection) -> None:
    """Raise VerificationError when perplexity rose above its limit."""
    check = section.perplexity
    if report is None or check is None or check.max_increase is None:
        return
    measured = report["perplexity"]
    increase = measured["quantized"]["perplexity"] / measured["unquantized"]["perplexity"]
    if not increase <= check.max_increase:
        raise VerificationError(
            f"perplexity is x{increase:.3f} of the unquantized model's, verify.perplexity.max_increase allows "
            f"x{check.max_increase}; choose a finer recipe or raise the limit"
        )
