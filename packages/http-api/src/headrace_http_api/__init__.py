"""OpenAI-compatible HTTP API for local inference: wire formats, routes and event streams."""
