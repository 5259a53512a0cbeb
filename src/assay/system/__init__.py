"""The machine: worker processes and their sandbox, HTTP clients and servers, event loops, free memory, model files."""
