"""Rotary embedding, one table for every engine: cached K is after RoPE, so both sides must rotate alike.

Owns what a model says about its rotation (:class:`RopeSpec`) and the inverse frequencies and factor that follow. Every operation is in
float32, in transformers' order: at position 8,000 a last-bit difference in the table would turn K by 0.0005.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import numpy as np


@dataclass(frozen=True)
class LinearScaling:
    """Every frequency divided by ``factor`` (position interpolation, arXiv:2306.15595)."""

    factor: float


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1's own: long waves divided by ``factor``, short ones kept, a ramp between. Long and short are relative to
    ``original_context_tokens``, those of training before.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context_tokens: int


@dataclass(frozen=True)
class YarnScaling:
    """NTK by parts (arXiv:2309.00071): a ramp between the dimensions that turn ``beta_fast`` and ``beta_slow`` times within
    ``original_context_tokens``, its ends rounded to whole dimensions if ``truncate``. Cosine and sine, so q and k each, are multiplied by
    ``attention_factor``.
    """

    factor: float
    original_context_tokens: int
    attention_factor: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True


@dataclass(frozen=True)
class FrequencyFactors:
    """Frequency i divided by ``factors[i]``: what GGUF keeps (``rope_freqs.weight``) of a scaling whose parameters it does not name."""

    factors: tuple[float, ...]


RopeScaling = LinearScaling | Llama3Scaling | YarnScaling | FrequencyFactors


@dataclass(frozen=True)
class RopeSpec:
    """Half-split rotation with base ``theta``. Raises ValueError, naming the field, for a number that is not finite and above 0."""

    theta: float
    scaling: RopeScaling | None = None

    def __post_init__(self) -> None:
        _check_positive("rope_theta", self.theta)
        for field in () if self.scaling is None else fields(self.scaling):
            value = getattr(self.scaling, field.name)
            for number in value if isinstance(value, tuple) else () if isinstance(value, bool) else (value,):
                _check_positive(f"rope_scaling.{field.name}", number)
        if isinstance(self.scaling, Llama3Scaling) and self.scaling.high_freq_factor <= self.scaling.low_freq_factor:
            given = f"{self.scaling.high_freq_factor}, allowed: above low_freq_factor={self.scaling.low_freq_factor}"
            raise ValueError(f"rope_scaling.high_freq_factor: given {given}")

    @property
    def attention_factor(self) -> float:
        """What cosine and sine are multiplied by."""
        return self.scaling.attention_factor if isinstance(self.scaling, YarnScaling) else 1.0


def inverse_frequencies(rope: RopeSpec, head_dim: int) -> np.ndarray:
    """``theta ** (-2 i / head_dim)``, scaled, for i in [0, head_dim / 2): float32 [head_dim / 2] (arXiv:2104.09864, section 3.2.2).

    An engine multiplies the table by the float32 position, then takes cosine and sine in float32.
    """
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    waves = np.float32(rope.theta) ** exponents
    table: np.ndarray = np.float32(1.0) / waves
    scaling = rope.scaling
    if isinstance(scaling, LinearScaling):
        table = table / np.float32(scaling.factor)
    elif isinstance(scaling, Llama3Scaling):
        table = _llama3(table, scaling)
    elif isinstance(scaling, YarnScaling):
        table = _yarn(waves, scaling, rope.theta, head_dim)
    elif isinstance(scaling, FrequencyFactors):
        if len(scaling.factors) != len(table):
            raise ValueError(f"rope factors: given {len(scaling.factors)}, allowed {len(table)}, one for every two of head_dim={head_dim}")
        table = table / np.array(scaling.factors, np.float32)
    return table.astype(np.float32)


def rotation_table(rope: RopeSpec, head_dim: int, num_positions: int) -> np.ndarray:
    """cos and sin of ``position * inverse frequency``, times the attention factor: float32 [2, num_positions, head_dim / 2]."""
    angles = np.arange(num_positions, dtype=np.float32)[:, None] * inverse_frequencies(rope, head_dim)
    return np.stack((np.cos(angles), np.sin(angles))) * np.float32(rope.attention_factor)


def yarn_attention_factor(factor: float, mscale: float | None = None, mscale_all_dim: float | None = None) -> float:
    """The attention factor that YaRN infers from ``factor`` (arXiv:2309.00071, eq. 22); with both mscales, DeepSeek's ratio of two."""

    def magnitude(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    return magnitude(mscale) / magnitude(mscale_all_dim) if mscale and mscale_all_dim else magnitude(1.0)


def recognise_llama3(factors: tuple[float, ...], theta: float, head_dim: int) -> RopeScaling:
    """The scaling behind GGUF's frequency factors: Llama 3.1 and 3.2's if they are what its parameters give, else the factors themselves.

    So a GGUF and a ``config.json`` of one model have equal specs.
    """
    scaling = Llama3Scaling(max(factors), 1.0, 4.0, 8192) if max(factors) > 0 else None
    if scaling is not None:
        wanted = inverse_frequencies(RopeSpec(theta), head_dim) / inverse_frequencies(RopeSpec(theta, scaling), head_dim)
        if len(wanted) == len(factors) and np.allclose(wanted, factors, rtol=1e-5, atol=0):
            return scaling
    return FrequencyFactors(factors)


def _llama3(table: np.ndarray, scaling: Llama3Scaling) -> np.ndarray:
    wavelengths = np.float32(2 * math.pi) / table
    longest_kept = scaling.original_context_tokens / scaling.high_freq_factor
    shortest_scaled = scaling.original_context_tokens / scaling.low_freq_factor
    smooth = np.float32(scaling.original_context_tokens) / wavelengths - np.float32(scaling.low_freq_factor)
    smooth = smooth / np.float32(scaling.high_freq_factor - scaling.low_freq_factor)
    scaled = table / np.float32(scaling.factor)
    between = (np.float32(1) - smooth) * scaled + smooth * table
    return np.where(wavelengths > shortest_scaled, scaled, np.where(wavelengths < longest_kept, table, between))


def _yarn(waves: np.ndarray, scaling: YarnScaling, theta: float, head_dim: int) -> np.ndarray:
    def dimension_of(turns: float) -> float:
        """The dimension that turns so many times within the original context."""
        return head_dim * math.log(scaling.original_context_tokens / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first, last = dimension_of(scaling.beta_fast), dimension_of(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    if first == last:
        last += 0.001
    ramp = (np.arange(head_dim // 2, dtype=np.float32) - np.float32(first)) / np.float32(last - first)
    kept = np.float32(1) - np.clip(ramp, 0, 1)
    extrapolated = np.float32(1) / waves
    interpolated = np.float32(1) / (np.float32(scaling.factor) * waves)
    return interpolated * (np.float32(1) - kept) + extrapolated * kept


def _check_positive(field: str, value: float) -> None:
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{field}: given {value}, allowed: above 0")
