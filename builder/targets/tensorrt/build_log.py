"""What TensorRT's builder says: kept line by line, for the reason of a failure and the memory of a plan."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from builder.gpu_manifest import Footprint

Severity = Literal["internal_error", "error", "warning", "info", "verbose"]

_MEMORY = {
    "weights_bytes": re.compile(r"Total Weights Memory: (\d+) bytes"),
    "activation_bytes": re.compile(r"Total Activation Memory: (\d+) bytes"),
    "scratch_bytes": re.compile(r"Max Scratch Memory: (\d+) bytes"),
}
# "IBuilder::buildSerializedNetwork: Error Code 1: Myelin (the reason In function at /_src/file.cpp:12)"
_REASON = re.compile(r"Error Code \d+: [^(]*\((?:\[[^]]*\] )?(?P<reason>.*?)(?: In \w+ at /_src.*)?\)?$", re.DOTALL)


class LogLine(NamedTuple):
    severity: Severity
    text: str


@dataclass
class BuildLog:
    """Lines down to "info", in order."""

    lines: list[LogLine] = field(default_factory=list)

    def logger(self, trt: Any) -> Any:
        """An ``ILogger`` that writes here. Whoever gives it to a builder must keep it alive as long."""
        names: dict[Any, Severity] = {
            trt.ILogger.INTERNAL_ERROR: "internal_error",
            trt.ILogger.ERROR: "error",
            trt.ILogger.WARNING: "warning",
            trt.ILogger.INFO: "info",
        }
        lines = self.lines

        class Logger(trt.ILogger):  # type: ignore[misc]  # the module has no type information
            def log(self, severity: Any, text: str) -> None:
                if severity in names:
                    lines.append(LogLine(names[severity], text))

        return Logger()

    @property
    def first_error(self) -> str | None:
        """The reason that the first error gives, on one line."""
        for severity, text in self.lines:
            if severity in ("internal_error", "error"):
                return reason_of(text)
        return None

    def since(self, mark: int) -> BuildLog:
        """The lines after the first ``mark``."""
        return BuildLog(self.lines[mark:])


def parse_footprint(lines: Iterable[LogLine]) -> Footprint:
    """The largest statement of each kind counts: a plan for several architectures has one of each."""
    found: dict[str, int] = {}
    for _, text in lines:
        for name, pattern in _MEMORY.items():
            if match := pattern.search(text):
                found[name] = max(int(match[1]), found.get(name, 0))
    return Footprint(**{name: found.get(name) for name in _MEMORY})


def reason_of(text: str) -> str:
    """An error line without the places in the library's source."""
    match = _REASON.search(text)
    return " ".join((match["reason"] if match else text).split())
