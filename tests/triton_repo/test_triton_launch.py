"""What is checked before a server starts."""

from __future__ import annotations

import socket
import sysconfig
from pathlib import Path

import pytest

from plansmith_errors import ServeError
from triton_repo.server.locate import bundled_installation, find_shared_libpython, locate_server
from triton_repo.server.ports import reserve_ports
from triton_repo.server.server_log import failure_line
from triton_repo.server.shared_memory import DIRECTORY, sweep, unique_prefix


def test_a_taken_port_is_named_with_the_flag_that_changes_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ServeError, match=f"port {port} on 127.0.0.1 is taken; .* serve.grpc_port"):
            reserve_ports("127.0.0.1", 0, port, 0)


def test_port_zero_takes_free_ports_that_differ() -> None:
    ports = reserve_ports("127.0.0.1", 0, 0, 0)
    assert len({ports.http, ports.grpc, ports.metrics}) == 3
    assert min(ports.http, ports.grpc, ports.metrics) > 0


def test_one_port_cannot_serve_twice() -> None:
    with pytest.raises(ServeError, match=r"port 9000 is given for serve\.http_port and serve\.metrics_port"):
        reserve_ports("127.0.0.1", 9000, 0, 9000)


@pytest.mark.parametrize("port", [-1, 65536])
def test_ports_have_a_range(port: int) -> None:
    with pytest.raises(ServeError, match=f"serve.http_port is {port}; expected 0"):
        reserve_ports("127.0.0.1", port, 0, 0)


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(ServeError, match="cannot be used"):
        reserve_ports("192.0.2.1", 0, 0, 0)


def test_a_python_without_shared_libpython_is_told_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("sys.base_prefix", str(tmp_path))
    monkeypatch.setattr(sysconfig, "get_config_var", {"LIBDIR": str(tmp_path / "lib")}.get)
    with pytest.raises(ServeError, match=r"libpython3\.\d+\.so\.1\.0 not found .*no shared libpython.*--enable-shared"):
        find_shared_libpython()


def test_an_explicit_server_must_be_a_program(tmp_path: Path) -> None:
    (tmp_path / "tritonserver").write_text("not executable")
    with pytest.raises(ServeError, match="not an executable file"):
        locate_server(tmp_path / "tritonserver")


def test_a_server_on_path_is_found_when_none_is_bundled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ServeError, match=r"no Triton server found.*plansmith\[serve\]"):
        locate_server()
    program = tmp_path / "tritonserver"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    assert locate_server().executable == program


def test_a_damaged_bundle_is_named(tmp_path: Path) -> None:
    with pytest.raises(ServeError, match="tritonserver: no such file; reinstall nvidia-pytriton"):
        bundled_installation(tmp_path)


def test_the_reason_is_found_in_the_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert failure_line(log) == "the server wrote nothing to its log"
    log.write_text(
        "I1130 22:10:17.1 12 server.cc:1] starting\n"
        "E1130 22:10:17.2 12 model_lifecycle.cc:642] failed to load 'llm' version 1: Internal: built for openvino 1, "
        "found 2\n"
        "error: creating server: Internal - failed to load all models\n"
    )
    assert failure_line(log) == "built for openvino 1, found 2"
    log.write_text(
        "E1130 22:10:17.2 12 model_lifecycle.cc:642] \"failed to load 'llm' version 1: Internal: RuntimeError: "
        'plansmith is not installed\\n\\nAt:\\n  /r/llm/1/model.py(15): <module>\\n"\n'
    )
    assert failure_line(log) == "plansmith is not installed"
    log.write_text("I1130 22:10:17.1 12 server.cc:1] starting\nE1130 22:10:17.2 12 http.cc:3] no such address\n")
    assert failure_line(log) == "no such address"


def test_only_its_own_shared_memory_is_swept() -> None:
    mine, other = unique_prefix(), unique_prefix()
    for prefix in (mine, other):
        (DIRECTORY / f"{prefix}region").write_bytes(b"x")
    assert sweep(mine) == 1
    assert sweep(other) == 1
