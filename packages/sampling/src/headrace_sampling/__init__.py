"""Samplers for MLX language models: per-row parameters and randomness, vectorised over the batch."""
