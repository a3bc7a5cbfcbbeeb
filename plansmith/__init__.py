"""Plansmith: quantize, compile, package, serve and verify language-model engines."""

from plansmith.version import __version__

__all__ = ["__version__"]
