"""The command line: one module per command, whose docstring is the beginning of its help."""
