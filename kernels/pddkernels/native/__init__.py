"""Kernels for the processor itself, in GNU C++ without any framework's headers, compiled on first use where they run."""
