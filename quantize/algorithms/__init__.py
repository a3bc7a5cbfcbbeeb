"""How int4 values are chosen when the inputs of a linear are known: importance-weighted rounding, AWQ, GPTQ."""
