"""The TensorRT targets: tensorrt-rtx, compiled ahead of time without a GPU, and the standard tensorrt."""
