"""Where the time of the steps goes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class StepTiming:
    """Totals over all steps, in seconds, since the generator was made."""

    num_steps: int = 0
    step_seconds: float = 0.0  # inside engine.step
    schedule_seconds: float = 0.0  # scheduling, block tables, step inputs
    sample_seconds: float = 0.0
    output_seconds: float = 0.0  # detokenizing, stop strings, outputs, the sink

    @property
    def host_seconds(self) -> float:
        """All of our Python in a step; what it costs to take requests in is not part of it."""
        return self.schedule_seconds + self.sample_seconds + self.output_seconds

    def add(self, *, schedule: float, step: float, sample: float, output: float) -> None:
        """Add one step."""
        self.num_steps += 1
        self.schedule_seconds += schedule
        self.step_seconds += step
        self.sample_seconds += sample
        self.output_seconds += output
