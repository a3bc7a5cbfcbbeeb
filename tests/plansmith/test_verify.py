"""A build whose quality passes a limit fails, and says by how much."""

import pytest

from plansmith.config import PerplexityCheck, VerifySection
from plansmith.verify import VerificationError, check_report


def section(limit):
    return VerifySection(perplexity=PerplexityCheck(text="t.txt", max_increase=limit))


def report(quantized, unquantized=20.0):
    return {"perplexity": {"quantized": {"perplexity": quantized}, "unquantized": {"perplexity": unquantized}}}


@pytest.mark.parametrize("quantized", [20.0, 30.0, 5.0])
def test_within_the_limit(quantized):
    check_report(report(quantized), section(1.5))


@pytest.mark.parametrize("quantized", [30.1, float("inf"), float("nan")])
def test_above_the_limit_is_exit_code_3(quantized):
    with pytest.raises(VerificationError, match=r"max_increase allows x1\.5") as error:
        check_report(report(quantized), section(1.5))
    assert error.value.exit_code == 3


def test_no_limit_no_failure():
    check_report(report(1e9), section(None))
    check_report(None, VerifySection())
