"""Headrace: a local OpenAI-compatible inference server for large language models on MLX."""
