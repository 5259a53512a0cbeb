"""Engines in other processes: their common base, and the engine `assay`. `assay.integrations` has the others."""
