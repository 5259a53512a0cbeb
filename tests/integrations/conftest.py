from ray_nodes import nodes  # noqa: F401 (a fixture)
