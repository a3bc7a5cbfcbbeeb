"""The client of ``serve``, a process of its own: ``stream_client.py URL``. Takes prompts as texts."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

from child import answer_lines
from sse import stream_all
from timeline import Timeline


def run(prompts: Sequence[str], max_tokens: int) -> dict[str, Any]:
    """Stream all prompts at once; returns Timeline.summary()."""
    sampling = json.dumps({"max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True})
    bodies = [{"text_input": prompt, "stream": True, "sampling_parameters": sampling} for prompt in prompts]
    timeline, counts = Timeline(len(prompts)), [0] * len(prompts)

    def on_message(number: int, message: dict[str, Any]) -> None:
        if "error" in message:
            sys.exit(f"a stream ended with {message['error']}")
        counts[number] += message["num_output_tokens"]
        timeline.add(number, timeline.now(), counts[number])

    stream_all(sys.argv[1], bodies, on_message)
    return timeline.summary()


if __name__ == "__main__":
    answer_lines(lambda: run)
