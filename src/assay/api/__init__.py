"""The Python API: what `import assay` exports, on top of the same components as the command line.

arguments   Python arguments -> settings; rows and models of a program -> files that settings can name; error messages
training    train, sft: a run from arguments; a run on the disk, which shows and measures itself
session     the steps of a run, for your own training loop
models      load, generate, serve
evaluation  evaluate, score
inspection  doctor, compare
notebook    what objects show in notebooks
"""
