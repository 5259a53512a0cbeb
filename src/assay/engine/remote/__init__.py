"""Engines in other processes: their common base, and one package or module for each kind of server."""
