"""assay: teach language models to reason by reinforcement learning with verifiable rewards."""

__version__ = "0.1.0"
