"""The processes of all ranks but the leading one: started, asked together, watched, ended together."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection, Pipe, wait

from builder.python_process import python_command
from builder.targets.tensorrt.runtime.layout import EngineLayout, encode_layout
from builder.targets.tensorrt.runtime.messages import Answer, Command, Failed, encode, receive_answer
from plansmith_errors import EngineError

_CLOSE_GRACE_S = 5.0
_CAUSE_GRACE_S = 1.0


class RankFailedError(EngineError):
    """Of a rank in another process."""


class RankGroup:
    """One process for each of ``ranks``; empty for an engine of one GPU. A failure of one is the end of all."""

    def __init__(self, layout: EngineLayout, ranks: Sequence[int], gpu: str, timeout_s: float) -> None:
        """``gpu`` names the function that opens a GPU, as ``module:function``. ``timeout_s`` bounds every answer."""
        self._timeout_s = timeout_s
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._connections: dict[int, Connection] = {}
        try:
            for rank in ranks:
                self._start(layout, rank, gpu)
        except OSError as error:
            self.kill()
            raise EngineError(f"the process of a rank cannot be started: {error.strerror}") from None

    def __len__(self) -> int:
        return len(self._connections)

    def ask(self, command: Command) -> None:
        """Send to all ranks; ``answers`` waits for what they say."""
        payload = encode(command)
        for rank, connection in self._connections.items():
            try:
                connection.send_bytes(payload)
            except OSError:
                raise self._gone(rank) from None

    def answers(self) -> dict[int, Answer]:
        """One answer of each rank. Raises EngineError for the first that failed, ended or took too long."""
        deadline = time.monotonic() + self._timeout_s
        waiting, found = {connection: rank for rank, connection in self._connections.items()}, {}
        while waiting:
            ready = wait(list(waiting), timeout=max(deadline - time.monotonic(), 0))
            if not ready:
                late = ", ".join(map(str, sorted(waiting.values())))
                raise RankFailedError(f"no answer from rank {late} within {self._timeout_s:g} s; the engine is closed")
            for connection in ready:
                rank = waiting.pop(connection)  # type: ignore[call-overload]
                found[rank] = self._receive(rank)
        return found

    def cause_of(self, error: EngineError) -> EngineError:
        """What came before the leading rank's own ``error``, if anything: a rank that failed or ended meanwhile."""
        if isinstance(error, RankFailedError):
            return error
        try:
            for connection in wait(list(self._connections.values()), timeout=_CAUSE_GRACE_S):
                (rank,) = (rank for rank, own in self._connections.items() if own is connection)
                self._receive(rank)
        except RankFailedError as cause:
            return cause
        return error

    def close(self) -> None:
        """Let them end by themselves, then kill. Safe to call twice."""
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()
        deadline = time.monotonic() + _CLOSE_GRACE_S
        for process in self._processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(deadline - time.monotonic(), 0))
        self.kill()

    def kill(self) -> None:
        for process in self._processes.values():
            process.kill()
            process.wait()
        self._processes.clear()

    def _start(self, layout: EngineLayout, rank: int, gpu: str) -> None:
        ours, theirs = Pipe()
        arguments = ["--fd", str(theirs.fileno()), "--rank", str(rank), "--gpu", gpu, "--layout", encode_layout(layout)]
        command = python_command("builder.targets.tensorrt.runtime.rank_process", *arguments)
        try:
            self._processes[rank] = subprocess.Popen(command, pass_fds=[theirs.fileno()])
        finally:
            theirs.close()
        self._connections[rank] = ours

    def _receive(self, rank: int) -> Answer:
        try:
            answer = receive_answer(self._connections[rank])
        except (EOFError, OSError):
            raise self._gone(rank) from None
        if isinstance(answer, Failed):
            raise RankFailedError(f"rank {rank}: {answer.message}")
        return answer

    def _gone(self, rank: int) -> RankFailedError:
        """Why a rank's connection closed, by its exit code."""
        try:
            code = self._processes[rank].wait(_CLOSE_GRACE_S)
        except subprocess.TimeoutExpired:
            return RankFailedError(f"rank {rank} closed its connection; the engine is closed")
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        return RankFailedError(f"the process of rank {rank} {how}; the engine is closed: load it again")
