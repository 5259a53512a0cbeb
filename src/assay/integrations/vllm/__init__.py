"""The engine "vllm": vLLM servers."""
