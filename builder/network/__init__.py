"""The decoder, written once, and the operations that each target implements for it."""

from builder.network.decoder import decoder
from builder.network.ops import AttentionSpec, NetworkOps

__all__ = ["AttentionSpec", "NetworkOps", "decoder"]
