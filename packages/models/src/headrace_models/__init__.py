"""Language models on MLX: architectures, weights, tokenizer codec and model sources."""
