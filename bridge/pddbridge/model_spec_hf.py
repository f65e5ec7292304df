"""A model's spec from the fields of its ``config.json``, family by family.

A field that nobody here knows is refused by name unless it is off (null, false, empty): a number that changes the network must not be
dropped in silence. Defaults are those of transformers' configuration classes, which published files rely on. No files are opened here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Final

from pddbridge.model_spec import GEMMA2, GEMMA3, GEMMA3_MULTIMODAL, LLAMA, MISTRAL, QWEN2, QWEN3, ModelSpec, plain_spec
from pddbridge.model_spec_fields import Fields, bool_field, float_field, int_field, optional_float, token_ids
from pddbridge.rope import RopeSpec
from pddbridge.rope_hf import read_layered_ropes, read_rope

# Say nothing about the network: how it was trained, saved, or is meant to be sampled from.
_NEUTRAL: Final = frozenset(
    {
        *("architectures", "model_type", "transformers_version", "torch_dtype", "dtype", "use_cache", "initializer_range"),
        *("attention_dropout", "hidden_dropout", "resid_pdrop", "pad_token_id", "bos_token_id", "eos_token_id", "pretraining_tp"),
        *("return_dict", "id2label", "label2id", "chunk_size_feed_forward", "problem_type", "cache_implementation", "torchscript"),
        *("is_llama_config", "transformers.js_config", "auto_map", "tokenizer_class", "task_specific_params", "num_logits_to_keep"),
        *("max_length", "min_length", "temperature", "top_k", "top_p", "num_beams", "num_beam_groups", "num_return_sequences"),
        *("repetition_penalty", "length_penalty", "diversity_penalty", "encoder_no_repeat_ngram_size", "no_repeat_ngram_size"),
        *("do_sample", "early_stopping", "typical_p", "max_new_tokens", "bad_words_ids", "suppress_tokens"),
        "unsloth_version",
    }
)
# Of the vision tower and the projector, which are not loaded.
_MULTIMODAL: Final = frozenset(
    {
        *("vision_config", "mm_tokens_per_image", "boi_token_index", "eoi_token_index", "image_token_index"),
        *("boi_token_id", "eoi_token_id", "image_token_id"),
    }
)
_COMMON: Final = frozenset(
    {
        *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"),
        *("hidden_act", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings"),
        *("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor"),
    }
)
_QWEN_WINDOW: Final = frozenset({"use_sliding_window", "sliding_window", "max_window_layers", "layer_types"})
_GEMMA: Final = frozenset(
    {
        *("hidden_activation", "query_pre_attn_scalar", "sliding_window", "sliding_window_size", "layer_types", "attention_bias"),
        *("final_logit_softcapping", "attn_logit_softcapping"),
    }
)
_GEMMA_DEFAULTS: Final[Fields] = MappingProxyType(
    {
        "head_dim": 256,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "tie_word_embeddings": True,
    }
)
# google's gemma-3 files name only what differs from these.
_GEMMA3_DEFAULTS: Final[Fields] = MappingProxyType(
    {
        **_GEMMA_DEFAULTS,
        "vocab_size": 262_208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 131_072,
    }
)


def from_hf_config(config: Fields, eos_token_ids: Iterable[int] = ()) -> ModelSpec:
    """Spec from the fields of ``config.json``; ``eos_token_ids`` from other files are united with the config's own.

    head_dim: the explicit field first, then the family's default, else hidden_size / num_attention_heads.
    Raises ValueError naming the field for anything missing, of wrong type, unknown, or not supported.
    """
    architectures = config.get("architectures")
    if architectures == [GEMMA3_MULTIMODAL]:
        return from_hf_config(_text_part(config), eos_token_ids)
    if not isinstance(architectures, list) or len(architectures) != 1 or architectures[0] not in _FAMILIES:
        raise ValueError(f"architectures: given {architectures}, allowed one of {sorted([*_FAMILIES, GEMMA3_MULTIMODAL])}")
    model_type, own_fields, defaults, family = _FAMILIES[architectures[0]]
    if config.get("model_type", model_type) != model_type:
        raise ValueError(f"model_type: given {config['model_type']!r}, allowed {model_type!r}")
    for field, value in config.items():
        if field not in _COMMON | _NEUTRAL | own_fields and not field.startswith("_") and value not in (None, False, "", [], {}):
            raise ValueError(f"{field}: given {value!r}, not supported by {architectures[0]}, only without it")
    if config.get("partial_rotary_factor") not in (None, 1, 1.0):
        raise ValueError(f"partial_rotary_factor: given {config['partial_rotary_factor']!r}, allowed 1.0")
    merged = {**defaults, **config}
    return family(merged, _plain(merged, str(architectures[0]), eos_token_ids))


def _text_part(config: Fields) -> Fields:
    """The text model of a multimodal Gemma 3, as the config of a model of its own; of the whole, what is said of images is left out."""
    if config.get("model_type", "gemma3") != "gemma3":
        raise ValueError(f"model_type: given {config['model_type']!r}, allowed 'gemma3'")
    text = config.get("text_config")
    if not isinstance(text, Mapping):
        raise ValueError(f"text_config: given {text!r}, allowed: an object")
    whole = {field: value for field, value in config.items() if field not in _MULTIMODAL and field not in ("model_type", "text_config")}
    return {**whole, **text, "architectures": [GEMMA3]}


def _plain(config: Fields, architecture: str, eos_token_ids: Iterable[int]) -> ModelSpec:
    """What all families share; the rest as in Llama without any bias."""
    num_layers, num_heads, hidden_size = (int_field(config, f) for f in ("num_hidden_layers", "num_attention_heads", "hidden_size"))
    if config.get("head_dim") is None and (num_heads < 1 or hidden_size % num_heads):
        raise ValueError(f"hidden_size: given {hidden_size}, must be a multiple of num_attention_heads={num_heads} without head_dim")
    head_dim = int_field(config, "head_dim", hidden_size // max(num_heads, 1))
    context = int_field(config, "max_position_embeddings")
    rope, max_context_tokens = (RopeSpec(1.0), context) if architecture == GEMMA3 else read_rope(config, context)
    return plain_spec(
        architecture=architecture,
        num_layers=num_layers,
        hidden_size=hidden_size,
        intermediate_size=int_field(config, "intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=int_field(config, "num_key_value_heads", num_heads),
        head_dim=head_dim,
        vocab_size=int_field(config, "vocab_size"),
        max_context_tokens=max_context_tokens,
        rms_norm_eps=float_field(config, "rms_norm_eps", 1e-6),
        rope=rope,
        tie_embeddings=bool_field(config, "tie_word_embeddings"),
        bos_token_id=None if config.get("bos_token_id") is None else int_field(config, "bos_token_id"),
        eos_token_ids=tuple(sorted({*eos_token_ids, *token_ids(config, "eos_token_id")})),
    )


def _llama(config: Fields, plain: ModelSpec) -> ModelSpec:
    _check_act(config, "hidden_act", "silu")
    bias = bool_field(config, "attention_bias")
    return replace(plain, qkv_bias=bias, attention_out_bias=bias, mlp_bias=bool_field(config, "mlp_bias"))


def _mistral(config: Fields, plain: ModelSpec) -> ModelSpec:
    """Every layer has the window (arXiv:2310.06825); null is none, and a file without the field means 4,096."""
    _check_act(config, "hidden_act", "silu")
    window = None if config["sliding_window"] is None else int_field(config, "sliding_window")
    return replace(plain, layer_windows=(window,) * plain.num_layers)


def _qwen2(config: Fields, plain: ModelSpec) -> ModelSpec:
    _check_act(config, "hidden_act", "silu")
    return replace(plain, qkv_bias=True, layer_windows=_qwen_windows(config, plain.num_layers))


def _qwen3(config: Fields, plain: ModelSpec) -> ModelSpec:
    _check_act(config, "hidden_act", "silu")
    bias = bool_field(config, "attention_bias")
    windows = _qwen_windows(config, plain.num_layers)
    return replace(plain, qk_norm=True, qkv_bias=bias, attention_out_bias=bias, layer_windows=windows)


def _gemma2(config: Fields, plain: ModelSpec) -> ModelSpec:
    """arXiv:2408.00118: every second layer has the window, the first among them."""
    kinds = _layer_types(config, [i % 2 == 0 for i in range(plain.num_layers)])
    return replace(
        _gemma(config, plain, kinds),
        attention_soft_cap=optional_float(config, "attn_logit_softcapping", 50.0),
        logit_soft_cap=optional_float(config, "final_logit_softcapping", 30.0),
    )


def _gemma3(config: Fields, plain: ModelSpec) -> ModelSpec:
    """arXiv:2503.19786: five layers with the window to one without, which alone have the long base of rotation."""
    period = int_field(config, "sliding_window_pattern", 6)
    if period < 1:
        raise ValueError(f"sliding_window_pattern: given {period}, allowed: 1 or more")
    if config.get("attn_logit_softcapping") is not None:
        # transformers carries the field and does not use it
        raise ValueError(f"attn_logit_softcapping: given {config['attn_logit_softcapping']!r}, allowed null in {GEMMA3}")
    kinds = _layer_types(config, [(i + 1) % period != 0 for i in range(plain.num_layers)])
    ropes, max_context_tokens = read_layered_ropes(config, plain.max_context_tokens)
    return replace(
        _gemma(config, plain, kinds),
        qk_norm=True,
        ropes=ropes,
        layer_ropes=tuple(int(sliding) for sliding in kinds),
        max_context_tokens=max_context_tokens,
        logit_soft_cap=optional_float(config, "final_logit_softcapping"),
    )


def _gemma(config: Fields, plain: ModelSpec, sliding: list[bool]) -> ModelSpec:
    """What Gemma 2 and 3 share: 1 + w norms, four of them a layer, embeddings times sqrt(hidden), a query scale of their own."""
    for field in ("hidden_act", "hidden_activation"):
        _check_act(config, field, "gelu_pytorch_tanh")
    if config.get("sliding_window_size", config["sliding_window"]) != config["sliding_window"]:  # written twice in the first files
        raise ValueError(f"sliding_window_size: given {config['sliding_window_size']!r}, sliding_window is {config['sliding_window']!r}")
    bias = bool_field(config, "attention_bias")
    scalar = float_field(config, "query_pre_attn_scalar")
    if not scalar > 0:
        raise ValueError(f"query_pre_attn_scalar: given {scalar}, allowed: above 0")
    return replace(
        plain,
        layer_windows=_windows(config, sliding),
        attention_scale=scalar**-0.5,
        qkv_bias=bias,
        attention_out_bias=bias,
        activation="gelu_tanh",
        norm_offset=1.0,
        post_norms=True,
        embedding_scale=plain.hidden_size**0.5,
    )


def _qwen_windows(config: Fields, num_layers: int) -> tuple[int | None, ...]:
    """Windows only where ``use_sliding_window`` says so, and then in layers from ``max_window_layers`` on."""
    used = bool_field(config, "use_sliding_window")
    first = int_field(config, "max_window_layers", 28) if used else num_layers
    kinds = _layer_types(config, [i >= first for i in range(num_layers)])
    if any(kinds) and not used:
        raise ValueError(f"layer_types: given {config['layer_types']!r}, allowed without 'sliding_attention' unless use_sliding_window")
    return _windows(config, kinds)


def _windows(config: Fields, sliding: list[bool]) -> tuple[int | None, ...]:
    window = int_field(config, "sliding_window") if any(sliding) else None
    return tuple(window if is_sliding else None for is_sliding in sliding)


def _layer_types(config: Fields, default: list[bool]) -> list[bool]:
    """Per layer whether it has the window: ``layer_types`` if given."""
    kinds = config.get("layer_types")
    if kinds is None:
        return default
    allowed = ("full_attention", "sliding_attention")
    if not isinstance(kinds, list) or len(kinds) != len(default) or not all(kind in allowed for kind in kinds):
        raise ValueError(f"layer_types: given {kinds!r}, allowed: {len(default)} of {list(allowed)}")
    return [kind == "sliding_attention" for kind in kinds]


def _check_act(config: Fields, field: str, allowed: str) -> None:
    if config.get(field, allowed) != allowed:
        raise ValueError(f"{field}: given {config[field]!r}, allowed {allowed!r}")


_Family = Callable[[Fields, ModelSpec], ModelSpec]
# By architecture: model_type, the fields it has beside the common ones, its defaults, and what it makes of them.
_FAMILIES: Final[dict[str, tuple[str, frozenset[str], Fields, _Family]]] = {
    LLAMA: ("llama", frozenset({"attention_bias", "mlp_bias"}), MappingProxyType({}), _llama),
    MISTRAL: ("mistral", frozenset({"sliding_window"}), MappingProxyType({"sliding_window": 4096}), _mistral),
    QWEN2: ("qwen2", _QWEN_WINDOW, MappingProxyType({"sliding_window": 4096}), _qwen2),
    QWEN3: ("qwen3", _QWEN_WINDOW | {"attention_bias"}, MappingProxyType({"head_dim": 128, "sliding_window": 4096}), _qwen3),
    GEMMA2: ("gemma2", _GEMMA, _GEMMA_DEFAULTS, _gemma2),
    GEMMA3: ("gemma3_text", _GEMMA | {"rope_local_base_freq", "sliding_window_pattern"}, _GEMMA3_DEFAULTS, _gemma3),
}
