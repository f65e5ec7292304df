"""The OpenAI-compatible HTTP front door."""
