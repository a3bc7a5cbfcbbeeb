"""A fake engine in a real engine process: the token after t is t + 1, and a script of flags says how it misbehaves."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from plansmith_errors import EngineError
from plugins.inflight_batching.step import EngineLimits, StepInputs
from triton_repo.backend.engine_process import serve

VOCAB_SIZE = 258


class ScriptedStepEngine:
    def __init__(self, script: argparse.Namespace) -> None:
        self._script = script
        self._num_steps = 0
        self.limits = EngineLimits(
            max_batch_size=4,
            max_num_tokens=64,
            max_seq_len=512,
            tokens_per_block=16,
            num_blocks=128,
            vocab_size=VOCAB_SIZE,
        )

    def step(self, inputs: StepInputs) -> Any:
        time.sleep(self._script.step_ms / 1000)
        self._num_steps += 1
        if self._num_steps == self._script.fail_at_step:
            raise EngineError("the script says to fail here")
        logits = np.zeros((len(inputs.logits_indices), VOCAB_SIZE), np.float32)
        last = inputs.input_ids[inputs.logits_indices]
        logits[np.arange(len(last)), (last + 1) % 256] = 1.0
        return logits

    def close(self) -> None:
        pass


def load(script: argparse.Namespace) -> ScriptedStepEngine:
    if script.chatter:
        os.write(1, b"a library greets the world\n")
    if script.refuse_to_load:
        raise EngineError("built for another machine; build it again")
    if script.refuse_second_load is not None:
        if script.refuse_second_load.exists():
            raise EngineError("loaded once already")
        script.refuse_second_load.touch()
    return ScriptedStepEngine(script)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("--step-ms", type=float, default=1.0)
    parser.add_argument("--fail-at-step", type=int)
    parser.add_argument("--refuse-to-load", action="store_true")
    parser.add_argument("--refuse-second-load", type=Path)
    parser.add_argument("--chatter", action="store_true")
    script = parser.parse_args()
    sys.exit(serve(lambda: load(script), script.tokenizer))
