"""The engine process: ``python -m triton_repo.backend.engine_process --engine DIR --tokenizer DIR``.

Commands come on standard input and messages go to standard output (``protocol``); the log goes to standard error. The
process ends when its standard input closes, so it never outlives its parent.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from plansmith_errors import PlansmithError
from triton_repo.backend.engine_service import EngineService
from triton_repo.backend.protocol import Command, LoadFailed, MessageReader, MessageWriter, Ready
from triton_repo.backend.tokenization import PromptTokenizer

if TYPE_CHECKING:
    from plugins.inflight_batching.step import StepEngine

logger = logging.getLogger(__name__)

CLOSE_GRACE_S = 8.0
EXIT_LOAD_FAILED = 2
EXIT_ENGINE_FAILED = 70


def serve(load_engine: Callable[[], StepEngine], tokenizer_directory: Path) -> int:
    """Load, say that we are ready, serve until standard input closes. Returns the exit code."""
    commands, writer = _take_pipes()
    try:
        tokenizer = PromptTokenizer(tokenizer_directory)
        engine = load_engine()
    except PlansmithError as error:
        writer.send(LoadFailed(str(error)))
        return EXIT_LOAD_FAILED

    from plugins.inflight_batching.generator import InflightGenerator

    service = EngineService(tokenizer, writer.send)
    generator = InflightGenerator(engine, tokenizer.tokenizer, tokenizer.eos_token_ids, service.sink, _exit_failed)
    limits = engine.limits
    max_prompt_bytes = limits.max_seq_len * tokenizer.longest_token_bytes
    writer.send(Ready(limits.max_batch_size, limits.max_seq_len, limits.vocab_size, max_prompt_bytes))
    reader: MessageReader[Command] = MessageReader(commands, Command)
    service.run(reader, generator)
    _exit_after(CLOSE_GRACE_S)
    generator.close()
    engine.close()
    return 0


def main() -> int:
    """Read the command line and serve the engine it names."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--engine", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--kv-cache-tokens", type=int)
    parser.add_argument("--num-threads", type=int)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s engine %(levelname)s %(message)s")

    def load() -> StepEngine:
        import builder

        num_blocks = _num_blocks(arguments.engine, arguments.kv_cache_tokens)
        return builder.load_engine(arguments.engine, num_blocks=num_blocks, num_threads=arguments.num_threads)

    return serve(load, arguments.tokenizer)


def _num_blocks(engine: Path, kv_cache_tokens: int | None) -> int | None:
    if kv_cache_tokens is None:
        return None
    import builder

    tokens_per_block = builder.read_manifest(engine).kv_cache.tokens_per_block
    return -(-kv_cache_tokens // tokens_per_block)


def _take_pipes() -> tuple[BinaryIO, MessageWriter]:
    """Move the message pipes away from fds 0 and 1, so that nothing printed by a library can corrupt them."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal reaches us too; the parent decides
    commands, events = os.dup(0), os.dup(1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    return open(commands, "rb"), MessageWriter(open(events, "wb", buffering=0))  # noqa: PTH123


def _exit_failed(error: BaseException) -> None:
    """The engine cannot go on. The requests have been told; a fresh process is the only sound way back."""
    logger.critical("the engine failed: %s", error, exc_info=error)
    os._exit(EXIT_ENGINE_FAILED)


def _exit_after(seconds: float) -> None:
    timer = threading.Timer(seconds, os._exit, [EXIT_ENGINE_FAILED])
    timer.daemon = True
    timer.start()


if __name__ == "__main__":
    sys.exit(main())
