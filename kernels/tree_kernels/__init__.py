"""Triton kernels for draft trees, each beside its plain PyTorch reference."""
