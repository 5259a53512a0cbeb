"""Benchmarks of the package's own parts, and the files that their figures are kept in."""
