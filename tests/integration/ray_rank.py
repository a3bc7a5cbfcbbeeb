"""Stand-in for the function that builds a rank."""

import logging
import os
import signal
from pathlib import Path

from plansmith_errors import BuildError


def build(arguments, output: Path, on_weight):
    on_weight(1, 1, "lm_head.weight")
    how = arguments["fail"]
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "refuse":
        raise BuildError("no kernel for sm70")
    if how == "warn":
        logging.getLogger("builder.example").warning("groups are unusual")
    (output / f"rank{arguments['rank']}.plan").write_text(str(arguments["rank"]))
    return {}
