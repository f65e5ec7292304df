"""Coordinator, OpenAI HTTP and gRPC front doors, text."""
