"""Deaths, departures and endings, on a real Triton server with a real engine."""

from __future__ import annotations

import concurrent.futures
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from served_llama import GREEDY, PROMPTS, descendants, engine_process, metrics, start, wait_until

from plansmith_errors import ServeError
from triton_repo import TritonServer, generate, stream_generate

pytestmark = pytest.mark.integration


def test_clients_that_leave_give_their_blocks_back(server: TritonServer) -> None:
    rng = random.Random(3)

    def run(number: int) -> None:
        stream = stream_generate(
            server.http_url, server.model_name, PROMPTS[number % 8], {**GREEDY, "max_tokens": 1500}
        )
        for _ in range(rng.randint(1, 5)):
            next(stream)
        stream.close()  # type: ignore[attr-defined]

    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        list(pool.map(run, range(48)))

    def is_empty() -> bool:
        now = metrics(server)
        running = now["plansmith_requests_running"] + now["plansmith_requests_waiting"]
        return running == 0 and now["plansmith_kv_blocks_free"] == now["plansmith_kv_blocks"] > 0

    wait_until(is_empty)
    assert generate(server.http_url, server.model_name, "a", {"max_tokens": 1}).num_output_tokens == 1


def test_a_killed_engine_ends_its_streams_and_comes_back_in_the_same_server(
    server: TritonServer, alone: Callable[[str, int], str]
) -> None:
    before, stub = server.pid, descendants(server)[0].pid
    ends: list[tuple[float, str]] = []
    started = threading.Barrier(9)

    def run(number: int) -> None:
        stream = stream_generate(server.http_url, server.model_name, PROMPTS[number], {**GREEDY, "max_tokens": 1900})
        next(stream)
        started.wait()
        try:
            for _ in stream:
                pass
            ends.append((time.monotonic(), "it ran to its end"))
        except ServeError as error:
            ends.append((time.monotonic(), str(error)))

    threads = [threading.Thread(target=run, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    started.wait()
    victim = engine_process(server)
    killed = time.monotonic()
    victim.send_signal(signal.SIGKILL)
    for thread in threads:
        thread.join(20)
    assert [message for _, message in ends] == [f"the engine process {victim.pid} was killed by SIGKILL"] * 8
    assert max(end for end, _ in ends) - killed < 2.0
    text = generate(server.http_url, server.model_name, PROMPTS[0], {**GREEDY, "max_tokens": 20}).text
    assert time.monotonic() - killed < 15.0
    assert text == alone(PROMPTS[0], 20)
    assert (server.pid, descendants(server)[0].pid) == (before, stub)
    wait_until(lambda: metrics(server)["plansmith_engine_restarts"] == 1)


def test_sigterm_lets_open_streams_finish_and_leaves_nothing_behind(
    repository: Path, alone: Callable[[str, int], str]
) -> None:
    with start(repository) as server:
        shared_memory = server._shm_prefix
        processes = descendants(server)
        stream = stream_generate(server.http_url, server.model_name, PROMPTS[3], {**GREEDY, "max_tokens": 1500})
        first = next(stream)
        os.kill(server.pid, signal.SIGTERM)
        chunks = [first, *stream]
        wait_until(lambda: server.poll() is not None)
        assert "code 0" in (server.poll() or "")
    assert chunks[-1].finish_reason == "length"
    assert "".join(chunk.text for chunk in chunks) == alone(PROMPTS[3], 1500)
    assert not any(process.is_running() for process in processes)
    assert not list(Path("/dev/shm").glob(f"{shared_memory}*"))


def test_engine_processes_do_not_outlive_a_killed_server(repository: Path) -> None:
    server = start(repository, drain_timeout=2)
    server.start()
    processes = descendants(server)
    assert len(processes) == 2
    os.kill(server.pid, signal.SIGKILL)
    _, alive = psutil.wait_procs(processes, timeout=10)
    assert alive == []
    server.stop()


def test_a_taken_port_is_said_before_anything_starts(server: TritonServer, repository: Path) -> None:
    port = int(server.http_url.rsplit(":", 1)[1])
    with pytest.raises(ServeError, match=f"port {port} on 127.0.0.1 is taken; .*serve.http_port"):
        TritonServer(repository, http_port=port, grpc_port=0, metrics_port=0).start()


def test_a_model_that_cannot_load_is_one_line(repository: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(repository, broken)
    manifest = broken / "llm/1/engine/engine.json"
    data = json.loads(manifest.read_text())
    data["library"]["openvino"] = "1999.1"
    manifest.write_text(json.dumps(data))
    with pytest.raises(ServeError, match=r"built for openvino 1999\.1, found .*build the engine again") as caught:
        start(broken).start()
    assert "\n" not in str(caught.value)


def test_serving_in_the_foreground_stops_on_ctrl_c(repository: Path) -> None:
    script = (
        "import sys, triton_repo\n"
        "for event in triton_repo.serve(sys.argv[1] and __import__('pathlib').Path(sys.argv[1]),"
        " http_port=0, grpc_port=0, metrics_port=0):\n"
        "    print(type(event).__name__, getattr(event, 'drained', ''), flush=True)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", script, str(repository)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline().split() == ["ServerReady"]
    process.send_signal(signal.SIGINT)
    rest, _ = process.communicate(timeout=60)
    assert rest.split() == ["ServerStopping", "ServerStopped", "True"]
    assert process.returncode == 0


def test_the_foreground_server_ends_when_the_stub_dies_so_that_something_can_start_it_again(repository: Path) -> None:
    command = [sys.executable, "-m", "plansmith", "serve", str(repository), "--output", "json"]
    ports = [part for port in ("http", "grpc", "metrics") for part in ("--set", f"serve.{port}_port=0")]
    process = subprocess.Popen([*command, *ports], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    answer = ""
    while not answer.rstrip().endswith("}"):
        answer += process.stdout.readline()
    ready = json.loads(answer)
    processes = psutil.Process(ready["pid"]).children(recursive=True)
    os.kill(processes[0].pid, signal.SIGKILL)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 2
    assert "the stub of Triton's Python backend died" in errors
    _, alive = psutil.wait_procs(processes, timeout=5)
    assert all(p.status() == psutil.STATUS_ZOMBIE for p in alive)  # where nobody reaps orphans
