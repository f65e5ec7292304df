"""What a ``config.json`` says about rotation: ``rope_theta`` and ``rope_scaling`` or, since transformers 5, ``rope_parameters``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from pddbridge.model_spec_fields import Fields, bool_field, float_field, int_field
from pddbridge.rope import LinearScaling, Llama3Scaling, RopeScaling, RopeSpec, YarnScaling, yarn_attention_factor

_DEFAULT_THETA: Final = 10_000.0
_GEMMA3_THETA: Final = 1_000_000.0
_FULL, _SLIDING = "full_attention", "sliding_attention"
_ALWAYS: Final = frozenset({"rope_type", "type", "rope_theta"})
_FIELDS: Final = {
    "default": frozenset[str](),
    "linear": frozenset({"factor"}),
    "dynamic": frozenset({"factor"}),
    "llama3": frozenset({"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}),
    "yarn": frozenset(
        {
            *("factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow"),
            *("mscale", "mscale_all_dim", "truncate"),
        }
    ),
}


def read_rope(config: Fields, context_tokens: int) -> tuple[RopeSpec, int]:
    """The rotation of every layer, and the context it serves: ``context_tokens`` (max_position_embeddings), or what YaRN extends it to.

    Raises ValueError naming the field for a kind of scaling, or a field of it, that is not supported.
    """
    found: list[float] = []
    scalings: list[tuple[str, Fields]] = []
    for field in ("rope_parameters", "rope_scaling"):
        given = _object(config, field)
        if "rope_theta" in given:
            found.append(float_field(given, "rope_theta"))
        if given:
            scalings.append((field, given))
    if config.get("rope_theta") is not None:
        found.append(float_field(config, "rope_theta"))
    if len(set(found)) > 1:
        raise ValueError(f"rope_theta: given twice with different values {found}")
    read = [_read_scaling(field, given, context_tokens) for field, given in scalings] or [(None, context_tokens)]
    if any(other != read[0] for other in read):
        raise ValueError(f"rope_scaling: given {config['rope_scaling']!r} beside other rope_parameters {config['rope_parameters']!r}")
    scaling, served = read[0]
    return RopeSpec(found[0] if found else _DEFAULT_THETA, scaling), served


def read_layered_ropes(config: Fields, context_tokens: int) -> tuple[tuple[RopeSpec, RopeSpec], int]:
    """Gemma 3's two rotations, of layers without and with a window, and the context served.

    Written as ``rope_theta``, ``rope_local_base_freq`` and a ``rope_scaling`` of the first alone, or as ``rope_parameters`` by layer type.
    """
    by_kind = _object(config, "rope_parameters")
    if by_kind and config.get("rope_scaling"):
        raise ValueError(f"rope_scaling: given {config['rope_scaling']!r} beside rope_parameters, allowed only one of them")
    unknown = sorted(set(by_kind) - {_FULL, _SLIDING})
    if unknown:
        raise ValueError(f"rope_parameters.{unknown[0]}: given {by_kind[unknown[0]]!r}, allowed [{_FULL!r}, {_SLIDING!r}]")
    full = _object(by_kind, _FULL, "rope_parameters.") or _object(config, "rope_scaling")
    sliding = _object(by_kind, _SLIDING, "rope_parameters.")
    full_theta = float_field(config, "rope_theta", _GEMMA3_THETA)
    sliding_theta = float_field(config, "rope_local_base_freq", _DEFAULT_THETA)
    full_scaling, served = _read_scaling(f"rope_parameters.{_FULL}" if by_kind else "rope_scaling", full, context_tokens)
    sliding_scaling, _ = _read_scaling(f"rope_parameters.{_SLIDING}", sliding, context_tokens)
    full_rope = RopeSpec(float_field(full, "rope_theta", full_theta), full_scaling)
    return (full_rope, RopeSpec(float_field(sliding, "rope_theta", sliding_theta), sliding_scaling)), served


def _read_scaling(where: str, given: Fields, context_tokens: int) -> tuple[RopeScaling | None, int]:
    kind = given.get("rope_type", given.get("type", "default"))
    if not isinstance(kind, str) or kind not in _FIELDS:
        raise ValueError(f"{where}.rope_type: given {kind!r}, allowed {sorted(_FIELDS)}")
    unknown = sorted(set(given) - _FIELDS[kind] - _ALWAYS)
    if unknown:
        raise ValueError(f"{where}.{unknown[0]}: given {given[unknown[0]]!r}, not supported by rope_type {kind!r}, only without it")
    try:
        if kind == "default":
            return None, context_tokens
        original = int_field(given, "original_max_position_embeddings", context_tokens)
        if kind == "yarn":
            return _yarn(given, original, context_tokens)
        factor = float_field(given, "factor")
        if kind == "linear":
            return LinearScaling(factor), context_tokens
        if kind == "llama3":
            low, high = float_field(given, "low_freq_factor"), float_field(given, "high_freq_factor")
            return Llama3Scaling(factor, low, high, original), context_tokens
    except ValueError as error:
        raise ValueError(f"{where}.{error}") from error
    # "dynamic": transformers changes the base once a sequence outgrows max_position_embeddings, and leaves K that it cached before as it
    # was. Up to there, which is all that is served, the table is the plain one.
    if not factor >= 1:
        raise ValueError(f"{where}.factor: given {factor}, allowed: 1 or more")
    return None, context_tokens


def _yarn(given: Fields, original: int, context_tokens: int) -> tuple[YarnScaling, int]:
    """The context served is what the factor makes of the original one where the config names no longer one, as Qwen's files mean it."""
    factor = float_field(given, "factor", context_tokens / max(original, 1))
    mscale, mscale_all_dim = (None if given.get(field) is None else float_field(given, field) for field in ("mscale", "mscale_all_dim"))
    attention_factor = float_field(given, "attention_factor", yarn_attention_factor(factor, mscale, mscale_all_dim))
    scaling = YarnScaling(
        factor,
        original,
        attention_factor,
        beta_fast=float_field(given, "beta_fast", 32.0),
        beta_slow=float_field(given, "beta_slow", 1.0),
        truncate=bool_field(given, "truncate", True),
    )
    return scaling, max(context_tokens, int(factor * original))


def _object(fields: Fields, field: str, prefix: str = "") -> Fields:
    value = fields.get(field)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ValueError(f"{prefix}{field}: given {value!r}, allowed: an object or null")
    return value
