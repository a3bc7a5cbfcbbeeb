"""The loops of rounding in C, built where there is a compiler when Plansmith is installed. NumPy does without them."""
