"""Runs of ``quantize_checkpoint`` that may be killed: a process for each, without the start of an interpreter.

Run as a script it is the process that these are forked from: it has imported everything and computed nothing. A run
that is forked from one that has used a matrix library on many threads can hang in that library's locks.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import builder
import quantize
from plansmith.directories import output_directory, resume_state
from quantize.recipe import Recipe

SHARD = 60_000  # bytes: several files


class Runs:
    """``plansmith quantize -o``"""

    def __init__(self, source: Path, recipe: dict[str, Any]) -> None:
        self.source, self.recipe = source, recipe
        self.num_tensors = len(quantize.open_checkpoint(source).names())
        self.num_resumed = 0
        ours, theirs = socket.socketpair()
        command = [sys.executable, __file__, str(theirs.fileno())]
        path = os.pathsep.join(filter(None, [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")]))
        environment = {**os.environ, "PYTHONPATH": path, "TOKENIZERS_PARALLELISM": "false"}
        self._server = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment)
        theirs.close()
        self._socket = ours

    def __enter__(self) -> Runs:
        return self

    def __exit__(self, *error: object) -> None:
        self._socket.close()  # it ends when nobody asks any more
        self._server.wait()

    def run(self, output: Path, written: int | None = None) -> int:
        """How many tensors it wrote; a byte goes to ``written`` for each."""
        count = 0

        def progress(done: int, total: int, name: str) -> None:
            nonlocal count
            count += 1
            if written is not None:
                os.write(written, b".")

        def on_resume(done: int, total: int) -> None:
            self.num_resumed = done

        self.num_resumed = 0
        tools = quantize.CalibrationTools(builder.calibration_runner)
        resume = quantize.Resume(resume_state(output), "the same", on_resume)
        with output_directory(output) as partial:
            quantize.quantize_checkpoint(
                self.source,
                partial,
                Recipe.model_validate(self.recipe),
                progress=progress,
                max_shard_bytes=SHARD,
                calibration_tools=tools,
                resume=resume,
            )
        return count

    def kill_after(self, output: Path, seconds: float, num_tensors: int = 0) -> int:
        """Kill a process so long after it wrote ``num_tensors``; how many it had written by then."""
        reader, writer = os.pipe()
        job = json.dumps({"source": str(self.source), "recipe": self.recipe, "output": str(output)})
        socket.send_fds(self._socket, [job.encode()], [writer])
        os.close(writer)
        child = int(self._socket.recv(100))
        with os.fdopen(reader, "rb") as file:
            seen = len(file.read(num_tensors))
            time.sleep(seconds)
            os.kill(child, signal.SIGKILL)
            self._socket.send(b"killed")
            self._socket.recv(100)
            return seen + len(file.read())


def serve(asked: socket.socket) -> None:
    import torch  # noqa: F401 - what calibration imports

    while True:
        message, descriptors, _, _ = socket.recv_fds(asked, 10_000, 1)
        if not message:
            return
        child = os.fork()
        if child == 0:
            work(json.loads(message), descriptors[0])
        os.close(descriptors[0])
        asked.send(str(child).encode())
        asked.recv(100)
        os.waitpid(child, 0)  # not before: the number must not be another process's when it is killed
        asked.send(b"gone")


def work(job: dict[str, Any], written: int) -> None:
    runs = Runs.__new__(Runs)
    runs.source, runs.recipe = Path(job["source"]), job["recipe"]
    try:
        runs.run(Path(job["output"]), written)
    finally:
        os._exit(0)


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
