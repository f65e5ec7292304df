"""What distinguishes one layer's attention from another's: the arguments that every path of the op takes besides arrays."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class AttentionOptions:
    """Hashable, so that it may be a static argument of a compiled function.

    ``scale`` multiplies q k^T. ``window``: a query at position p sees keys p - window + 1 .. p, itself among them (as ``sliding_window`` in
    Hugging Face configs), None for all before it. ``soft_cap`` c: scores become c * tanh(scores / c) after scaling (arXiv:2408.00118).

    Sinks are an array and go beside: ``sinks`` [heads] float32, one logit per query head that takes part in the softmax and has no value
    (as in gpt-oss), None for none.

    Raises ValueError naming the field.
    """

    scale: float
    window: int | None = None
    soft_cap: float | None = None

    def __post_init__(self) -> None:
        if self.scale <= 0:
            raise ValueError(f"scale: given {self.scale}, allowed: above 0")
        if self.window is not None and self.window < 1:
            raise ValueError(f"window: given {self.window}, allowed: 1 or more, or None")
        if self.soft_cap is not None and self.soft_cap <= 0:
            raise ValueError(f"soft_cap: given {self.soft_cap}, allowed: above 0, or None")
