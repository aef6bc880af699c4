"""CUDA graphs of the target for trees of several sizes, of which each step takes one."""
