"""``model.py`` of a repository: a few lines that hand over to the installed plansmith, or say what is missing."""

from __future__ import annotations

FILE_NAME = "model.py"

_EXTRAS = {"cpu": "cpu,serve", "tensorrt-rtx": "tensorrt-rtx,gpu,serve", "tensorrt": "gpu,serve"}  # that run an engine

_TEMPLATE = '''\
"""The model that Triton loads: the code is in the plansmith package of the Python backend's interpreter."""

from importlib.metadata import PackageNotFoundError, version

PACKAGED_BY = "{version}"

try:
    installed = version("plansmith")
except PackageNotFoundError:
    raise RuntimeError(
        f"plansmith is not installed in the interpreter of Triton's Python backend; "
        f"install it there: pip install 'plansmith[{extras}]=={{PACKAGED_BY}}'"
    ) from None
if installed != PACKAGED_BY:
    raise RuntimeError(
        f"this repository was packaged by plansmith {{PACKAGED_BY}}, and {{installed}} is installed in the interpreter "
        f"of Triton's Python backend; package the engine again or install plansmith=={{PACKAGED_BY}}"
    )

from triton_repo.backend.triton_model import TritonPythonModel  # noqa: E402, F401
'''


def render_model_file(plansmith_version: str, target: str) -> str:
    """The text of ``model.py`` for the version that packages an engine of ``target``."""
    return _TEMPLATE.format(version=plansmith_version, extras=_EXTRAS.get(target, "serve"))
