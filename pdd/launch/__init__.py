"""Bring up local processes and the emulated link between them."""
