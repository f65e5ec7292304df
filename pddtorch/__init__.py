"""PyTorch engine: the same contract as :mod:`pddjax`. Implements :class:`pddbridge.engine.Engine`.

Importing this package imports no torch, so a launcher can ask :mod:`pddtorch.threads` for a worker's environment first.
"""
