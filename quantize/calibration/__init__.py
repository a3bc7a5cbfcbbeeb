"""Calibration: a text through the model, layer by layer, to see what the inputs of its linears look like."""
