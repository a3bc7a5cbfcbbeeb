"""What this machine has: GPUs, their driver, memory. Asked of the driver itself, without a library of ours."""

from builder.machine.facts import Gpu, Machine, this_machine
from builder.machine.memory import HostMemory, host_memory

__all__ = ["Gpu", "HostMemory", "Machine", "host_memory", "this_machine"]
