"""Compiling kernels ahead of time for chips that are not in this machine, and what the compiled code says of itself."""
