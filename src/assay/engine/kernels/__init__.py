"""Kernels of the engine: Triton for CUDA, C for CPUs. Only files in this room import triton; others import these where
they use them. The C is compiled and called by `assay.engine.compiled`."""
