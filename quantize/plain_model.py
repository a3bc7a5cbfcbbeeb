"""Checkpoints whose tensors have other names or parts than the decoder, seen as those of a plain decoder."""

from __future__ import annotations

from quantize.checkpoint import Checkpoint
from quantize.split_projections import split_projections
from quantize.text_part import text_part


def as_plain_model(source: Checkpoint) -> Checkpoint:
    """``source`` itself when there is nothing to see otherwise. Raises CheckpointError.

    What another tool packed is first unpacked, so here it only loses what belongs to no language model.
    """
    from quantize.foreign.recognize import is_foreign

    source = text_part(source)
    return source if is_foreign(source) else split_projections(source)
