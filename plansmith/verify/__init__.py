"""What quantization cost: measured through the engine that is shipped, held against limits, shown to a reader."""

from plansmith.verify.limits import VerificationError, check_report

__all__ = ["VerificationError", "check_report"]
