"""Offline rotations: the same function of the tokens, computed with weights that are easier to round."""
