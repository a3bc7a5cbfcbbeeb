"""A Triton server as a context manager: started when ready to answer, gone without a trace afterwards."""

from __future__ import annotations

import contextlib
import http.client
import logging
import os
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from plansmith_errors import ServeError
from triton_repo.repository import Repository, check_repository
from triton_repo.server.locate import Installation, locate_server
from triton_repo.server.ports import Ports, reserve_ports
from triton_repo.server.server_log import failure_line
from triton_repo.server.shared_memory import sweep, unique_prefix

logger = logging.getLogger(__name__)

_Value = TypeVar("_Value")

POLL_S = 0.05
KILL_GRACE_S = 5.0


class TritonServer:
    """Serves one model repository on this machine.

    ``server`` names a tritonserver binary (default: the bundled one, else the one on PATH); a port of 0 takes a free
    one; ``log_file`` keeps the server's log, which otherwise lives as long as the server; ``drain_timeout`` seconds
    are given to open streams when it stops. All errors are ServeError or RepositoryError, raised by ``start``.
    """

    def __init__(
        self,
        repository: Path,
        *,
        host: str = "127.0.0.1",
        http_port: int = 8000,
        grpc_port: int = 8001,
        metrics_port: int = 8002,
        server: Path | None = None,
        log_file: Path | None = None,
        log_verbose: bool = False,
        ready_timeout: float = 600.0,
        drain_timeout: int = 30,
    ) -> None:
        self._path = repository
        self._host = host
        self._wanted_ports = (http_port, grpc_port, metrics_port)
        self._server = server
        self._log_file = log_file
        self._log_verbose = log_verbose
        self._ready_timeout = ready_timeout
        self.drain_timeout = drain_timeout
        self._shm_prefix = unique_prefix()
        self._directory: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._repository: Repository | None = None
        self._ports: Ports | None = None

    def __enter__(self) -> TritonServer:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def model_name(self) -> str:
        return self._started(self._repository).model_name

    @property
    def http_url(self) -> str:
        return f"http://{self._url_host}:{self._started(self._ports).http}"

    @property
    def grpc_address(self) -> str:
        """``host:port``, as tritonclient wants it."""
        return f"{self._url_host}:{self._started(self._ports).grpc}"

    @property
    def metrics_url(self) -> str:
        return f"http://{self._url_host}:{self._started(self._ports).metrics}/metrics"

    @property
    def pid(self) -> int:
        return self._started(self._process).pid

    @property
    def log_file(self) -> Path:
        return self._log_file or self._started(self._directory) / "tritonserver.log"

    def start(self) -> None:
        """Check everything that can be checked, start the server, and return when the model is ready."""
        if self._process is not None:
            raise ServeError(f"{self._path}: this server is already running")
        self._repository = check_repository(self._path)
        installation = locate_server(self._server)
        self._ports = reserve_ports(self._host, *self._wanted_ports)
        self._directory = Path(tempfile.mkdtemp(prefix="plansmith-serve-"))
        try:
            self._spawn(installation)
            self._wait_ready()
        except BaseException:  # also Ctrl-C: a server that did not come up must not stay
            self.kill()
            raise

    def poll(self) -> str | None:
        """None while the server runs; otherwise how it ended, in one line."""
        code = self._started(self._process).poll()
        return None if code is None else f"the server ended with code {code}: {failure_line(self.log_file)}"

    def request_stop(self) -> None:
        """Ask the server to refuse new connections and end when the open streams have; returns at once."""
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()

    def stop(self) -> None:
        """Drain and end the server; whatever is left after the drain timeout is killed. Safe to call twice."""
        if self._process is None:
            return
        self.request_stop()
        try:
            self._process.wait(self.drain_timeout + KILL_GRACE_S)
        except subprocess.TimeoutExpired:
            logger.warning("the server did not stop within %d s and is killed", self.drain_timeout)
        self.kill()

    def kill(self) -> None:
        """End the server and all its processes at once, and remove what they leave behind. Safe to call twice."""
        if self._process is not None:
            self._kill_group(self._process)
            self._process = None
            sweep(self._shm_prefix)
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = None

    @property
    def _url_host(self) -> str:
        host = "127.0.0.1" if self._host == "0.0.0.0" else self._host
        return f"[{host}]" if ":" in host else host

    def _started(self, value: _Value | None) -> _Value:
        if value is None:
            raise ServeError(f"{self._path}: the server is not running; start it first")
        return value

    def _spawn(self, installation: Installation) -> None:
        directory = self._started(self._directory)
        command = [str(installation.executable), *self._arguments(installation.link_backends(directory))]
        try:
            with self.log_file.open("wb") as log:
                # a session of its own: Ctrl-C in the terminal is ours to handle, and the group can be ended as one
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=installation.environment(),
                    start_new_session=True,
                )
        except OSError as error:
            raise ServeError(f"{installation.executable}: cannot be started: {error}") from None

    def _arguments(self, backends: Path | None) -> list[str]:
        ports, repository = self._started(self._ports), self._started(self._repository)
        arguments = {
            "model-repository": repository.path,
            "http-address": self._host,
            "http-port": ports.http,
            "grpc-address": self._host,
            "grpc-port": ports.grpc,
            "metrics-address": self._host,
            "metrics-port": ports.metrics,
            "model-control-mode": "explicit",
            "load-model": repository.model_name,
            "backend-config": f"python,shm-region-prefix-name={self._shm_prefix}",
            "exit-timeout-secs": self.drain_timeout,
            "log-verbose": int(self._log_verbose),
        }
        if backends is not None:
            arguments["backend-directory"] = backends
        return ["--disable-auto-complete-config", *(f"--{name}={value}" for name, value in arguments.items())]

    def _wait_ready(self) -> None:
        deadline = time.monotonic() + self._ready_timeout
        while not self.is_ready():
            if (end := self._started(self._process).poll()) is not None:
                raise ServeError(f"the server did not come up (exit code {end}): {failure_line(self.log_file)}")
            if time.monotonic() > deadline:
                last = failure_line(self.log_file)
                raise ServeError(
                    f"the server was not ready within {self._ready_timeout:.0f} s; last in its log: {last}"
                )
            time.sleep(POLL_S)

    def is_ready(self) -> bool:
        """Whether the server answers and says that its model is ready."""
        connection = http.client.HTTPConnection(self._url_host.strip("[]"), self._started(self._ports).http, timeout=2)
        try:
            connection.request("GET", f"/v2/models/{self.model_name}/ready")
            return connection.getresponse().status == http.client.OK
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def _kill_group(self, process: subprocess.Popen[bytes]) -> None:
        """End what is left of the server's process group: the server, its stubs and their engine processes."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
