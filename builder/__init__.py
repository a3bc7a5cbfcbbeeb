"""From a checkpoint to an engine: model spec, the network written once, its targets, the engine artifact."""

from builder.engine import build_engine, load_engine, load_reference
from builder.manifest import EngineManifest, read_manifest
from builder.model_spec import ModelSpec
from builder.options import BuildOptions
from builder.perplexity import Perplexity, perplexity

__all__ = [
    "BuildOptions",
    "EngineManifest",
    "ModelSpec",
    "Perplexity",
    "build_engine",
    "load_engine",
    "load_reference",
    "perplexity",
    "read_manifest",
]
