"""Other packages and programs. The core loads what is here by name, so that their packages are optional."""
