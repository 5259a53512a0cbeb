"""The Python API: what `import assay` exports, on top of the same components as the command line.

arguments   Python arguments -> settings
errors      error messages that name Python arguments and objects
data        rows and models in memory -> files that settings can name
training    train, sft, session: a run from arguments
session     the steps of a run, for your own training loop
saved       a run on the disk, which shows and measures itself
models      load, generate
evaluation  evaluate, score
serving     serve
inspection  doctor, compare
html        what objects show in notebooks
"""
