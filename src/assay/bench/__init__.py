"""Benchmarks behind `assay bench`, and their result files."""
