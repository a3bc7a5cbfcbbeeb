"""Finds a Triton server, and the interpreter that its Python backend will run.

The ``nvidia-pytriton`` wheel carries a server without GPU support; NVIDIA's container has one on PATH.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from plansmith_errors import ServeError

BACKEND_FILES = ("libtriton_python.so", "triton_python_backend_utils.py")
STUB = "triton_python_backend_stub"


@dataclass(frozen=True)
class Installation:
    """A server. ``backend_files`` is empty when the server has a backend directory of its own."""

    executable: Path
    backend_files: tuple[Path, ...] = ()
    library_path: Path | None = None  # where the stub finds libpython

    def link_backends(self, directory: Path) -> Path | None:
        """Make a backend directory of symbolic links (the backend looks for its stub beside itself)."""
        if not self.backend_files:
            return None
        python = directory / "backends" / "python"
        python.mkdir(parents=True)
        for file in self.backend_files:
            (python / file.name).symlink_to(file)
        return python.parent

    def environment(self) -> dict[str, str]:
        """The server's environment: the first ``python3`` on PATH decides the stub's packages; PYTHONPATH does not."""
        environment = dict(os.environ)
        environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environment.get("PATH", os.defpath)])
        if self.library_path is not None:
            others = environment.get("LD_LIBRARY_PATH")
            environment["LD_LIBRARY_PATH"] = os.pathsep.join([str(self.library_path), *([others] if others else [])])
        return environment


def locate_server(explicit: Path | None = None) -> Installation:
    """The server at a path, else the bundled one, else ``tritonserver`` on PATH. Raises ServeError with the remedy."""
    if explicit is not None:
        if not os.access(explicit, os.X_OK) or explicit.is_dir():
            raise ServeError(f"{explicit}: not an executable file; expected a tritonserver binary")
        return Installation(explicit)
    bundled = _bundled_directory()
    if bundled is not None:
        return bundled_installation(bundled)
    on_path = shutil.which("tritonserver")
    if on_path is not None:
        return Installation(Path(on_path))
    raise ServeError(
        "no Triton server found: neither the nvidia-pytriton wheel nor a tritonserver on PATH; "
        "run: pip install 'plansmith[serve]', or use NVIDIA's container"
    )


def bundled_installation(directory: Path) -> Installation:
    """The server of the nvidia-pytriton wheel with this interpreter's stub. Raises ServeError when they do not fit."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    stub = directory / "python_backend_stubs" / version / STUB
    files = (*(directory / "backends" / "python" / name for name in BACKEND_FILES), stub)
    executable = directory / "bin" / "tritonserver"
    for file in (executable, *files):
        if not file.is_file():
            raise ServeError(
                f"{file}: no such file; reinstall nvidia-pytriton, or use a Python it supports (3.10 to 3.12)"
            )
    if not (Path(sys.executable).parent / "python3").exists():
        raise ServeError(
            f"{Path(sys.executable).parent}: has no python3, by which Triton finds this interpreter; use a venv"
        )
    return Installation(executable, files, find_shared_libpython())


def find_shared_libpython() -> Path:
    """The directory of this interpreter's libpython, which the stub loads. Raises ServeError with the remedy."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    name = f"libpython{version}.so.1.0"
    # relocated builds keep the directory they were compiled for in LIBDIR, so the base prefix is tried too
    candidates = [Path(sys.base_prefix, "lib")]
    if libdir := sysconfig.get_config_var("LIBDIR"):
        multiarch = sysconfig.get_config_var("MULTIARCH") or ""
        candidates += [Path(libdir), Path(libdir, multiarch)]
    for directory in candidates:
        if (directory / name).exists():
            return directory
    raise ServeError(
        f"{name} not found (looked in {', '.join(map(str, candidates))}): this Python has no shared libpython, which "
        f"Triton's Python backend needs; use one that has, for example 'uv python install {version}' or "
        f"'PYTHON_CONFIGURE_OPTS=--enable-shared pyenv install {version}', or on Debian and Ubuntu "
        f"'apt-get install libpython{version}'"
    )


def _bundled_directory() -> Path | None:
    # find_spec does not import: pytriton's own import takes a second and changes signal handlers
    spec = importlib.util.find_spec("pytriton")
    for location in (spec.submodule_search_locations or []) if spec else []:
        directory = Path(location, "tritonserver")
        if (directory / "bin" / "tritonserver").is_file():
            return directory
    return None
