"""From a training step to a graph with costs: operations, fusion, costs and devices.

program         a program as plain data: operations on numbered values
from_jaxpr      a jaxpr as such a program
fusion          the values that kernels write to memory, as a graph
products        operands of products and convolutions that a compiler copies into another order
expansion       the memory of operations that a compiler expands into several
result_buffers  temporaries in the buffers of results
costs           seconds per equation, from figures of a device or measured
partition       how a sharded step is divided among devices
devices         figures of devices: FLOP/s, bandwidths, memory
targets         the devices that a program is planned for, present or described ahead of time
compiled        the compiler's memory analysis
settings        settings of the compiler that change a compiled program
"""
