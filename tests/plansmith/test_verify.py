"""A build whose quality passes a limit fails, and says by how much."""

import pytest

from plansmith.config import VerifySection
from plansmith.verify import VerificationError, check_report

TEXT = {"perplexity": {"text": "t.txt"}}
CHOICES = {"questions": "q.jsonl", "labels": "l.lst"}


def section(limit):
    return VerifySection(perplexity={"text": "t.txt", "max_increase": limit})


def report(quantized=20.0, unquantized=20.0, **changes):
    return {
        "perplexity": {"quantized": {"perplexity": quantized}, "unquantized": {"perplexity": unquantized}},
        "divergence": {"kl_per_token": 0.1, "top1_agreement": 0.9},
        "choices": {"quantized": {"acc": 0.6}},
        **changes,
    }


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
    check_report(report(), VerifySection(**TEXT, choices=CHOICES))


@pytest.mark.parametrize(
    ("within", "outside", "message"),
    [
        ({"kl": {"max_mean": 0.1}}, {"kl": {"max_mean": 0.09}}, r"KL .* 0\.1 nats per token, verify\.kl\.max_mean"),
        ({"top1": {"min_agreement": 0.9}}, {"top1": {"min_agreement": 0.91}}, r"top-1 .* 0\.9000, verify\.top1\.min"),
        (
            {"choices": {**CHOICES, "min_acc": 0.6}},
            {"choices": {**CHOICES, "min_acc": 0.61}},
            r"acc is 0\.6000, verify\.choices\.min_acc asks 0\.61",
        ),
    ],
)
def test_each_limit_is_held(within, outside, message):
    check_report(report(), VerifySection(**TEXT, **within))
    with pytest.raises(VerificationError, match=message):
        check_report(report(), VerifySection(**TEXT, **outside))


def test_all_passed_limits_and_the_worst_weights_are_named_in_one_line():
    weights = [{"name": f"w{i}", "scheme": "int4", "relative_error": error} for i, error in enumerate([0.1, 0, 0.3])]
    limits = VerifySection(**TEXT, kl={"max_mean": 0.01}, top1={"min_agreement": 1.0})
    with pytest.raises(VerificationError) as error:
        check_report(report(weights=weights), limits)
    message = str(error.value)
    assert "verify.kl.max_mean" in message and "verify.top1.min_agreement" in message
    assert "largest weight errors: w2 (int4, 0.300), w0 (int4, 0.100); choose" in message
    assert "\n" not in message
