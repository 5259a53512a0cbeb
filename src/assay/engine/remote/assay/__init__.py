"""The engine "assay": servers of `assay serve`."""
