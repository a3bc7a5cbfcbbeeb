"""Checkpoints that other tools quantized, read as if they were plain models: rows are dequantized on demand."""
