"""The native engine: continuous batching over a paged key-value cache, on CUDA, on a CPU in C, or in plain torch."""
