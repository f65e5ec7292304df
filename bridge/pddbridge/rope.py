"""The inverse-frequency table of rotary embedding, one for every engine: cached K is after RoPE, so both sides must rotate alike."""

from __future__ import annotations

import numpy as np

from pddbridge.model_spec import ModelSpec


def inverse_frequencies(spec: ModelSpec) -> np.ndarray:
    """``theta ** (-2 i / head_dim)`` for i in [0, head_dim / 2): float32 [head_dim / 2] (arXiv:2104.09864, section 3.2.2).

    Every operation in float32, as transformers has it. An engine multiplies the table by the float32 position, then takes cosine and sine
    in float32: at position 8,000 a last-bit difference here would turn K by 0.0005.
    """
    exponents = np.arange(0, spec.head_dim, 2, dtype=np.float32) / np.float32(spec.head_dim)
    return (1.0 / np.float32(spec.rope_theta) ** exponents).astype(np.float32)
