"""A TensorRT network executed on the CPU: the very object that is compiled, layer by layer, in NumPy.

It proves a network's numbers where there is no GPU. The vendor's kernels it does not prove: they may keep more digits
between layers than a network says, or sum in another order.
"""

from builder.network.interpreter.interpreter import Collective, Interpreter
from builder.network.interpreter.lockstep import Meetings, run_lockstep

__all__ = ["Collective", "Interpreter", "Meetings", "run_lockstep"]
