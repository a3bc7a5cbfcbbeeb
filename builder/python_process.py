"""How processes of our own are started."""

from __future__ import annotations

import json
import sys

_BOOT = "import json, sys; sys.path[:] = json.loads(sys.argv.pop(1)); from {module} import main; sys.exit(main())"


def python_command(module: str, *arguments: str) -> list[str]:
    """The command that calls ``main`` of ``module`` in a new process, with ``arguments`` in ``sys.argv``.

    Isolated: neither the working directory nor PYTHON* variables decide what is imported there, but our own path.
    """
    return [sys.executable, "-I", "-c", _BOOT.format(module=module), json.dumps(sys.path), *arguments]
