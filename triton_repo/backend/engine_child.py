"""One engine process as its parent sees it: pipes, death, and how it ended."""

from __future__ import annotations

import fcntl
import logging
import signal
import subprocess
from collections.abc import Iterator
from typing import BinaryIO, cast

from triton_repo.backend.protocol import Command, Event, MessageReader, MessageWriter

logger = logging.getLogger(__name__)

PIPE_BYTES = 1 << 20


class EngineChild:
    """Starts the process at once. It ends when its standard input is closed; its standard error is our own."""

    def __init__(self, command: list[str]) -> None:
        """Raises OSError when the process cannot be started."""
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
        stdin, stdout = cast(BinaryIO, self._process.stdin), cast(BinaryIO, self._process.stdout)
        for pipe in (stdin, stdout):
            widen(pipe)
        self._writer = MessageWriter(stdin)
        self._reader: MessageReader[Event] = MessageReader(open(stdout.fileno(), "rb", closefd=False), Event)  # noqa: SIM115

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, command: Command) -> None:
        """Pass a command on. That the process is gone is told by ``events`` alone, so it is no error here."""
        try:
            self._writer.send(command)
        except (OSError, ValueError) as error:  # ValueError: closed on our side
            logger.debug("engine process %d takes no commands: %s", self.pid, error)

    def events(self) -> Iterator[Event]:
        """What the process says, until it ends."""
        return iter(self._reader)

    def describe_end(self) -> str:
        """Reap the process and say in one line how it ended."""
        code = self._process.wait()
        self._writer.close()
        if code < 0:
            known = {number.value: number.name for number in signal.Signals}
            return f"the engine process {self.pid} was killed by {known.get(-code, f'signal {-code}')}"
        return f"the engine process {self.pid} ended with exit code {code}; see the server log"

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def stop(self, timeout: float) -> None:
        """Close its standard input, which asks it to end; kill it after ``timeout`` seconds."""
        self._writer.close()
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            logger.warning("engine process %d did not end within %.0f s and is killed", self.pid, timeout)
            self.kill()


def widen(pipe: BinaryIO) -> None:
    """Make a pipe hold more than any step writes, so that a step does not wait for the reader."""
    try:
        fcntl.fcntl(pipe.fileno(), fcntl.F_SETPIPE_SZ, PIPE_BYTES)  # type: ignore[attr-defined, unused-ignore]
    except (OSError, AttributeError) as error:  # an unprivileged user's quota, or Python before 3.10
        logger.warning("a pipe of %d bytes was refused (%s); the default size is used", PIPE_BYTES, error)
