"""Architecture facts of a model, read once from ``config.json`` or GGUF metadata.

Everything an engine must know to build the network is in :class:`ModelSpec`; anything unknown is refused by name.
This module sees mappings only; files are opened by :mod:`pddbridge.checkpoint`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

LLAMA: Final = "LlamaForCausalLM"

# Defaults of transformers' LlamaConfig, for fields that old config.json files leave out.
_DEFAULT_ROPE_THETA: Final = 10_000.0
_DEFAULT_RMS_NORM_EPS: Final = 1e-6

# GGUF keys of architecture "llama" that are understood here or say nothing about the network; any other is refused by name.
_GGUF_KEYS: Final = frozenset(
    {
        "block_count",
        "context_length",
        "embedding_length",
        "feed_forward_length",
        "attention.head_count",
        "attention.head_count_kv",
        "attention.key_length",
        "attention.value_length",
        "attention.layer_norm_rms_epsilon",
        "rope.freq_base",
        "rope.dimension_count",
        "rope.scaling.type",
        "vocab_size",
        "expert_count",
        "expert_used_count",
        "tensor_data_layout",
    }
)

_POSITIVE: Final = (
    *("num_layers", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim"),
    *("vocab_size", "max_context_tokens", "rms_norm_eps", "rope_theta"),
)


@dataclass(frozen=True)
class ModelSpec:
    """Llama-family decoder. ``rope_theta`` with half-split rotation; ``tie_embeddings`` is what the checkpoint really holds
    (see :mod:`pddbridge.checkpoint`), not only what the config says. ``eos_token_ids`` is the union of every source.
    """

    architecture: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_context_tokens: int
    rms_norm_eps: float
    rope_theta: float
    tie_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]

    def __post_init__(self) -> None:
        for field in _POSITIVE:
            value = getattr(self, field)
            if not (np.isfinite(value) and value > 0):
                raise ValueError(f"{field}: given {value}, allowed: above 0")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_kv_heads: given {self.num_kv_heads}, must divide num_heads={self.num_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim: given {self.head_dim}, must be even for rotary embedding")
        for token_id in (*self.eos_token_ids, *(() if self.bos_token_id is None else (self.bos_token_id,))):
            if not 0 <= token_id < self.vocab_size:
                raise ValueError(f"eos_token_id or bos_token_id: given {token_id}, allowed 0..{self.vocab_size - 1}")


def from_hf_config(config: Mapping[str, object], eos_token_ids: Iterable[int] = ()) -> ModelSpec:
    """Spec from the fields of ``config.json``; ``eos_token_ids`` from other files are united with the config's own.

    head_dim: the explicit field first, else hidden_size / num_attention_heads. RoPE theta: ``rope_theta`` or ``rope_parameters``.
    Raises ValueError naming the field for anything missing, of wrong type, or not supported.
    """
    architectures = config.get("architectures")
    if architectures != [LLAMA]:
        raise ValueError(f"architectures: given {architectures}, allowed [{LLAMA!r}]")
    for field, allowed in (("model_type", "llama"), ("hidden_act", "silu")):
        if config.get(field, allowed) != allowed:
            raise ValueError(f"{field}: given {config[field]!r}, allowed {allowed!r}")
    for field in ("quantization_config", "sliding_window", "rope_interleaved"):
        if config.get(field):
            raise ValueError(f"{field}: given {config[field]!r}, not supported, only without it")
    if config.get("partial_rotary_factor") not in (None, 1, 1.0):
        raise ValueError(f"partial_rotary_factor: given {config['partial_rotary_factor']!r}, allowed 1.0")
    num_heads = _int(config, "num_attention_heads")
    hidden_size = _int(config, "hidden_size")
    if config.get("head_dim") is None and (num_heads < 1 or hidden_size % num_heads):
        raise ValueError(f"hidden_size: given {hidden_size}, must be a multiple of num_attention_heads={num_heads} without head_dim")
    bos = config.get("bos_token_id")
    return ModelSpec(
        architecture=LLAMA,
        num_layers=_int(config, "num_hidden_layers"),
        hidden_size=hidden_size,
        intermediate_size=_int(config, "intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=num_heads if config.get("num_key_value_heads") is None else _int(config, "num_key_value_heads"),
        head_dim=hidden_size // num_heads if config.get("head_dim") is None else _int(config, "head_dim"),
        vocab_size=_int(config, "vocab_size"),
        max_context_tokens=_int(config, "max_position_embeddings"),
        rms_norm_eps=_float(config, "rms_norm_eps", _DEFAULT_RMS_NORM_EPS),
        rope_theta=_rope_theta(config),
        tie_embeddings=_bool(config, "tie_word_embeddings"),
        attention_bias=_bool(config, "attention_bias"),
        mlp_bias=_bool(config, "mlp_bias"),
        bos_token_id=None if bos is None else _int(config, "bos_token_id"),
        eos_token_ids=tuple(sorted({*eos_token_ids, *token_ids(config, "eos_token_id")})),
    )


def from_gguf(
    metadata: Mapping[str, object],
    *,
    vocab_size: int,
    tie_embeddings: bool,
    attention_bias: bool,
    mlp_bias: bool,
    eos_token_ids: Iterable[int] = (),
) -> ModelSpec:
    """Spec from GGUF key-values. GGUF says nothing of ties and biases: its tensors show them, and ``vocab_size`` (embedding rows).

    Float32 values take their shortest decimal, so a GGUF and a ``config.json`` of one model give equal specs.
    Raises ValueError naming the key for anything missing, of wrong type, or not supported.
    """
    architecture = metadata.get("general.architecture")
    if architecture != "llama":
        raise ValueError(f"general.architecture: given {architecture!r}, allowed 'llama'")
    unknown = sorted(key for key in metadata if key.startswith("llama.") and key.removeprefix("llama.") not in _GGUF_KEYS)
    if unknown:
        raise ValueError(f"{unknown[0]}: given {metadata[unknown[0]]!r}, not supported, only without it")
    if metadata.get("llama.rope.scaling.type", "none") != "none":
        raise ValueError(f"llama.rope.scaling.type: given {metadata['llama.rope.scaling.type']!r}, allowed 'none'")
    if metadata.get("llama.expert_count", 0) != 0:
        raise ValueError(f"llama.expert_count: given {metadata['llama.expert_count']!r}, allowed 0")
    if metadata.get("llama.vocab_size", vocab_size) != vocab_size:
        raise ValueError(f"llama.vocab_size: given {metadata['llama.vocab_size']!r}, but the embedding has {vocab_size} rows")
    num_heads = _int(metadata, "llama.attention.head_count")
    hidden_size = _int(metadata, "llama.embedding_length")
    if num_heads < 1 or ("llama.attention.key_length" not in metadata and hidden_size % num_heads):
        raise ValueError(f"llama.embedding_length: given {hidden_size}, must be a multiple of llama.attention.head_count={num_heads}")
    head_dim = _int(metadata, "llama.attention.key_length") if "llama.attention.key_length" in metadata else hidden_size // num_heads
    for key in ("llama.attention.value_length", "llama.rope.dimension_count"):
        if metadata.get(key, head_dim) != head_dim:
            raise ValueError(f"{key}: given {metadata[key]!r}, allowed {head_dim} (the key length)")
    eos_keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")
    own_eos = [token_id for key in eos_keys for token_id in token_ids(metadata, key)]
    return ModelSpec(
        architecture=LLAMA,
        num_layers=_int(metadata, "llama.block_count"),
        hidden_size=hidden_size,
        intermediate_size=_int(metadata, "llama.feed_forward_length"),
        num_heads=num_heads,
        num_kv_heads=_int(metadata, "llama.attention.head_count_kv") if "llama.attention.head_count_kv" in metadata else num_heads,
        head_dim=head_dim,
        vocab_size=vocab_size,
        max_context_tokens=_int(metadata, "llama.context_length"),
        rms_norm_eps=_shortest(_float(metadata, "llama.attention.layer_norm_rms_epsilon", None)),
        rope_theta=_shortest(_float(metadata, "llama.rope.freq_base", _DEFAULT_ROPE_THETA)),
        tie_embeddings=tie_embeddings,
        attention_bias=attention_bias,
        mlp_bias=mlp_bias,
        bos_token_id=_int(metadata, "tokenizer.ggml.bos_token_id") if "tokenizer.ggml.bos_token_id" in metadata else None,
        eos_token_ids=tuple(sorted({*eos_token_ids, *own_eos})),
    )


def token_ids(fields: Mapping[str, object], field: str) -> tuple[int, ...]:
    """Token ids of a field that may be absent, null, one id or a list of ids. Raises ValueError for anything else."""
    value = fields.get(field)
    ids = () if value is None else tuple(value) if isinstance(value, list) else (value,)
    for token_id in ids:
        if not isinstance(token_id, int) or isinstance(token_id, bool):
            raise ValueError(f"{field}: given {value!r}, allowed: a token id, a list of token ids, or null")
    return ids


def _rope_theta(config: Mapping[str, object]) -> float:
    """Theta of default RoPE: ``rope_theta`` with ``rope_scaling`` beside it or, since transformers 5, ``rope_parameters.rope_theta``."""
    found: list[float] = []
    for field in ("rope_parameters", "rope_scaling"):
        scaling = config.get(field)
        if scaling is None:
            continue
        if not isinstance(scaling, Mapping):
            raise ValueError(f"{field}: given {scaling!r}, allowed: an object or null")
        kind = scaling.get("rope_type", scaling.get("type", "default"))
        if kind != "default":
            raise ValueError(f"{field}.rope_type: given {kind!r}, allowed 'default'")
        unknown = sorted(set(scaling) - {"rope_type", "type", "rope_theta"})
        if unknown:
            raise ValueError(f"{field}.{unknown[0]}: given {scaling[unknown[0]]!r}, not supported, only without it")
        if "rope_theta" in scaling:
            found.append(_float(scaling, "rope_theta", None))
    if config.get("rope_theta") is not None:
        found.append(_float(config, "rope_theta", None))
    if len(set(found)) > 1:
        raise ValueError(f"rope_theta: given twice with different values {found}")
    return found[0] if found else _DEFAULT_ROPE_THETA


def _int(fields: Mapping[str, object], field: str) -> int:
    value = fields.get(field)
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"{field}: given {value!r}, allowed: an integer")
    return value


def _float(fields: Mapping[str, object], field: str, default: float | None) -> float:
    value = fields.get(field, default)
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ValueError(f"{field}: given {value!r}, allowed: a number")
    return float(value)


def _bool(fields: Mapping[str, object], field: str) -> bool:
    value = fields.get(field, False)
    if not isinstance(value, bool):
        raise ValueError(f"{field}: given {value!r}, allowed: true or false")
    return value


def _shortest(value: float) -> float:
    return float(str(np.float32(value)))
