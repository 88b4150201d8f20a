"""KV caches for MLX language models: row slots, attention over them, byte accounting."""
