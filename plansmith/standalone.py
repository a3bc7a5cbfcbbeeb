"""Settings of a verb that is run by itself: the same keys as in a build file, given with --set."""

from __future__ import annotations

from collections.abc import Sequence

from plansmith.config import BuildFile, load_build_file
from plansmith_errors import ConfigError


def section_settings(settings: Sequence[str], *sections: str, **defaults: str) -> BuildFile:
    """A build file of ``defaults`` and settings; a setting of a section that this verb does not read is refused."""
    for setting in settings:
        found = setting.split(".")[0].split("=")[0]
        if found not in sections:
            names = " and ".join(repr(section) for section in sections)
            plural = "s" if len(sections) > 1 else ""
            raise ConfigError(f"--set {setting!r}: this verb reads only keys of the section{plural} {names}")
    return load_build_file(None, settings, **{"model": ".", **defaults})
