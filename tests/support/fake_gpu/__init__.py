"""A GPU that is none: tensors that say `cuda` and hold their values in the host's memory.

What a GPU would refuse is refused: operands on two devices, and host tensors given to kernels. What
would make the host wait is recorded with its line, or refused. Copies to the host arrive when they
are waited for and not before. Launches and copies are counted. Kernels run in Triton's interpreter.

It shows neither races inside a kernel nor errors of a compiler, and nothing of graphs or of times.
"""
