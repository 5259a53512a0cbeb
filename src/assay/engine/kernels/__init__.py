"""Triton kernels of the engine. Only files in this room import triton; others import these where they use them."""
