"""`pdd conform`: the equality ladder, L0 to L4, between two engines on their devices. `tests/conformance` runs the same code."""
