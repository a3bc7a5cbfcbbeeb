"""A rank's process, started by the leading rank.

It ends when the leader's end of the socket closes, even while a step waits for ranks that are no more.
"""

from __future__ import annotations

import argparse
import logging
import os
import queue
import signal
import sys
import threading
from importlib import import_module
from multiprocessing.connection import Connection

from builder.parallel import Rank
from builder.targets.tensorrt.runtime.gpu import Communicator, OpenGpu
from builder.targets.tensorrt.runtime.layout import EngineLayout, decode_layout
from builder.targets.tensorrt.runtime.messages import (
    Allocate,
    Answer,
    Command,
    Done,
    Failed,
    Join,
    Loaded,
    Ready,
    encode,
    read_feeds,
    receive_command,
)
from builder.targets.tensorrt.runtime.rank import RankRuntime
from plansmith_errors import EngineError, PlansmithError

_EXIT_LEADER_GONE = 70


class RankProcess:
    """Answers the leader's commands, one after the other."""

    def __init__(self, layout: EngineLayout, rank: Rank, open_gpu: OpenGpu) -> None:
        self._layout, self._rank, self._open_gpu = layout, rank, open_gpu
        self._runtime: RankRuntime | None = None

    def answer(self, command: Command) -> Answer:
        """Raises PlansmithError."""
        if isinstance(command, Join):
            return self._join(command)
        if self._runtime is None:
            raise EngineError("a command came before the rank had joined; this is a bug of plansmith")
        if isinstance(command, Allocate):
            self._runtime.allocate(command.num_blocks)
            return Ready()
        self._runtime.start(command.mode, read_feeds(command))
        self._runtime.finish()
        return Done()

    def _join(self, command: Join) -> Loaded:
        gpu = self._open_gpu(self._layout.target, self._layout.devices[self._rank.rank])
        parallelism = self._layout.parallelism
        communicator: Communicator = gpu.join(
            command.unique_id, self._rank.rank, parallelism.tp_size, parallelism.world_size
        )
        self._runtime = RankRuntime(self._layout, self._rank, gpu, communicator)
        return Loaded(self._runtime.free_bytes(), self._runtime.bytes_per_block, self._runtime.max_blocks)


def serve(connection: Connection, process: RankProcess) -> int:
    """Answer until the leader closes the connection or a command fails. Returns the exit code."""
    commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(connection, commands), daemon=True).start()
    while True:
        try:
            answer: Answer = process.answer(commands.get())
        except PlansmithError as error:
            answer = Failed(str(error))
        except Exception as error:
            logging.getLogger(__name__).exception("the rank failed")
            answer = Failed(f"{type(error).__name__}: {error}")
        connection.send_bytes(encode(answer))
        if isinstance(answer, Failed):
            return 1


def _read(connection: Connection, commands: queue.SimpleQueue[Command]) -> None:
    """In a thread of its own: a step may wait for ever for a rank that died, and must not outlive the leader."""
    try:
        while True:
            commands.put(receive_command(connection))
    except (EOFError, OSError):
        os._exit(_EXIT_LEADER_GONE)


def load_open_gpu(path: str) -> OpenGpu:
    """``module:function``."""
    module, _, name = path.partition(":")
    found: OpenGpu = getattr(import_module(module), name)
    return found


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--layout", required=True)
    parser.add_argument("--gpu", required=True)
    arguments = parser.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal reaches us too; the leader decides
    logging.basicConfig(
        level=logging.INFO, format=f"%(asctime)s rank {arguments.rank} %(levelname)s %(message)s", stream=sys.stderr
    )
    layout = decode_layout(arguments.layout)
    rank = Rank(layout.parallelism, arguments.rank)
    return serve(Connection(arguments.fd), RankProcess(layout, rank, load_open_gpu(arguments.gpu)))
