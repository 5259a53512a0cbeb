"""Checkers for authors of engines and environments."""
