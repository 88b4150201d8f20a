"""Whisper over HTTP on MLX: a dictation server that idles at tens of megabytes."""
