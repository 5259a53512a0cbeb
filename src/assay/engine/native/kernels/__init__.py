"""Kernels of the native engine: Triton for CUDA devices, C (`cpu.c`) for small models on a CPU."""
