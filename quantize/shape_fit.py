"""Whether every tensor has the shape that config.json gives it: told before any of them is worked on."""

from __future__ import annotations

from plansmith_errors import CheckpointError
from quantize.checkpoint import Checkpoint
from quantize.lint.hf import shape_of


def check_shapes(checkpoint: Checkpoint) -> None:
    """Raises CheckpointError for a tensor that config.json contradicts, or a config.json that cannot be read."""
    model = shape_of(checkpoint)
    expected = dict(model.other_tensors())
    expected |= {name: (linear.out_features, linear.in_features) for name, linear in model.linear_weights()}
    for info in checkpoint:
        wanted = expected.get(info.name, tuple(info.shape))
        if tuple(info.shape) != wanted:
            raise CheckpointError(
                f"{checkpoint.path}: tensor {info.name!r} has the shape {list(info.shape)}, config.json gives it "
                f"{list(wanted)}; get both from the same place"
            )
