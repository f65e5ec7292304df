"""Kernels for the processor itself that XLA calls, with its own threads; see :mod:`pddkernels.native` for PyTorch's."""
