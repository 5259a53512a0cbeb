"""The engine "sglang": SGLang servers."""
