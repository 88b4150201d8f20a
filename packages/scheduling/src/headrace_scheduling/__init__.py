"""Continuous batching for MLX language models: engine port, gateway and batch scheduler."""
