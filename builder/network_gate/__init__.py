"""The numeric gate of TensorRT builds: the networks of all ranks, interpreted, against the float32 reference."""
