"""Ray: processes of a run on the machines of a cluster. The only place that imports the package `ray`, when it is used.

`cluster`: the connection. `programs`: programs in actors. `learners`: the command `assay train` as the driver of a
cluster. `servers`: engine servers. `judges`: judging on all nodes. `environments`: environments on all nodes.
"""
