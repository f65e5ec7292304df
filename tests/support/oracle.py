"""The float32 oracle of tests is the one of the product."""

from __future__ import annotations

from pddtorch.oracle import greedy, logits, model

__all__ = ["greedy", "logits", "model"]
