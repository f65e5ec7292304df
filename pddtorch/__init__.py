"""PyTorch engine: the same contract as :mod:`pddjax`. Implements :class:`pddbridge.engine.Engine`."""
