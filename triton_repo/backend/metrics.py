"""Engine counters on Triton's own metrics port. One thread alone may touch them: the server crashes otherwise."""

from __future__ import annotations

from typing import Any

from triton_repo.backend.protocol import Stats


class EngineMetrics:
    """Made and updated by the supervisor thread. ``utils`` is the ``triton_python_backend_utils`` module."""

    def __init__(self, utils: Any, model: str) -> None:
        self._utils = utils
        self._labels = {"model": model}
        self._families: list[Any] = []  # a metric does not keep its family alive
        self._last: dict[Any, float] = {}
        self._running = self._gauge("plansmith_requests_running", "Requests in the running batch")
        self._waiting = self._gauge("plansmith_requests_waiting", "Requests that wait for a place in the batch")
        self._blocks = self._gauge("plansmith_kv_blocks", "KV cache blocks of the engine")
        self._free_blocks = self._gauge("plansmith_kv_blocks_free", "KV cache blocks that no request holds")
        self._steps = self._gauge("plansmith_engine_steps", "Steps of the running engine process")
        self._prompt = self._gauge("plansmith_prompt_tokens", "Prompt tokens of the running engine process")
        self._output = self._gauge("plansmith_output_tokens", "Generated tokens of the running engine process")
        self._preemptions = self._gauge("plansmith_preemptions", "Preemptions of the running engine process")
        self._restarts = self._gauge("plansmith_engine_restarts", "Engine processes started after the first")
        self._refused = self._gauge("plansmith_requests_refused", "Requests refused because the queue was full")

    def update(self, stats: Stats, num_restarts: int, num_refused: int) -> None:
        """Set what changed; each set is a round trip to the server."""
        self._set(self._running, stats.num_running)
        self._set(self._waiting, stats.num_waiting)
        self._set(self._blocks, stats.num_blocks)
        self._set(self._free_blocks, stats.num_free_blocks)
        self._set(self._steps, stats.num_steps)
        self._set(self._prompt, stats.num_prompt_tokens)
        self._set(self._output, stats.num_output_tokens)
        self._set(self._preemptions, stats.num_preemptions)
        self._set(self._restarts, num_restarts)
        self._set(self._refused, num_refused)

    def _gauge(self, name: str, description: str) -> Any:
        kind = self._utils.MetricFamily.GAUGE  # they start again at zero with the engine, which a counter must not
        family = self._utils.MetricFamily(name=name, description=description, kind=kind)
        self._families.append(family)
        return family.Metric(labels=self._labels)

    def _set(self, metric: Any, value: float) -> None:
        if self._last.get(metric) != value:
            metric.set(value)
            self._last[metric] = value
