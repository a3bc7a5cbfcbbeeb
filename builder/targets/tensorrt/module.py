"""Which Python module stands for TensorRT: the one place where a target chooses it."""

from __future__ import annotations

from importlib import import_module
from typing import Any, Literal

from plansmith_errors import BuildError

TensorRtTarget = Literal["tensorrt-rtx", "tensorrt"]

_MODULES = {"tensorrt-rtx": "tensorrt_rtx", "tensorrt": "tensorrt"}
_INSTALL = {"tensorrt-rtx": "pip install 'plansmith[tensorrt-rtx]'", "tensorrt": "pip install 'tensorrt>=11'"}
_OLDEST = {"tensorrt-rtx": (1, 7), "tensorrt": (11, 0)}  # that have every layer of our networks


def load_module(target: TensorRtTarget) -> Any:
    """Import the module of ``target``. Raises BuildError where it is missing, or too old for our networks."""
    name = _MODULES[target]
    try:
        module = import_module(name)
    except (ImportError, OSError) as error:
        reason = "" if isinstance(error, ModuleNotFoundError) else f" ({error})"
        raise BuildError(
            f"target {target} needs the Python module {name}, which cannot be imported{reason}; run: {_INSTALL[target]}"
        ) from None
    version = getattr(module, "__version__", "0.0")  # a folder of this name can be imported, too
    found = tuple(int(part) for part in version.split(".")[:2])
    if found < _OLDEST[target]:
        wanted = ".".join(map(str, _OLDEST[target]))
        raise BuildError(f"target {target} needs {name} {wanted} or newer, found {version}; run: {_INSTALL[target]}")
    return module


def target_of(module: Any) -> TensorRtTarget:
    """The target whose module it is."""
    return "tensorrt-rtx" if module.__name__ == _MODULES["tensorrt-rtx"] else "tensorrt"
