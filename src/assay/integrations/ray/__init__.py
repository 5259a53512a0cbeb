"""Ray: processes of a run on the machines of a cluster. The only place that imports the package `ray`, when it is used.

`cluster`: the connection, and programs in actors. `learners`: the command `assay train` as the driver of a cluster.
`servers`: engine servers. `judges` and `environments`: judging and environments on all nodes.
"""
