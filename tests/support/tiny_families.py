"""Tiny random checkpoints of every family, for transformers and for PDD. Sizes differ pairwise, windows are a few tokens, soft caps bite.

Tensor names and shapes are those of transformers' own models, so nothing here repeats what the checkpoint reader believes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import gguf
import numpy as np
from safetensors.numpy import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from tests.support.tiny_models import ENDOFTEXT_ID, IM_END_ID, IM_START_ID, add_gguf_tokenizer, permute, write_tokenizer

Config = dict[str, object]

_SIZES: Config = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 10,
    "vocab_size": 300,
    "max_position_embeddings": 16_384,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "bos_token_id": IM_START_ID,
    "eos_token_id": IM_END_ID,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}
_LLAMA: Config = _SIZES | {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
_QWEN2: Config = _SIZES | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "head_dim": 8, "rope_theta": 1_000_000.0}
_GEMMA: Config = {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True}

FAMILIES: dict[str, Config] = {
    "llama": _LLAMA,
    "llama3": _LLAMA
    | {
        "rope_theta": 500_000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "llama linear": _LLAMA | {"rope_scaling": {"type": "linear", "factor": 4.0}},
    "llama dynamic": _LLAMA | {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
    "llama yarn": _LLAMA | {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}},
    "llama yarn mscale": _LLAMA
    | {
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 40.96,
            "original_max_position_embeddings": 400,
            "mscale": 1.0,
            "mscale_all_dim": 0.5,
            "beta_fast": 16,
            "beta_slow": 2,
        }
    },
    "mistral": _SIZES | {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 24},
    "qwen2": _QWEN2,
    "qwen2 window": _QWEN2 | {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1},
    "qwen3": _SIZES
    | {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 24,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "tie_word_embeddings": True,
    },
    "gemma2": _SIZES
    | _GEMMA
    | {
        "architectures": ["Gemma2ForCausalLM"],
        "model_type": "gemma2",
        "sliding_window": 16,
        "query_pre_attn_scalar": 7,
        "attn_logit_softcapping": 4.0,
        "final_logit_softcapping": 3.0,
    },
    "gemma3": _SIZES
    | _GEMMA
    | {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "sliding_window": 12,
        "sliding_window_pattern": 2,
        "query_pre_attn_scalar": 20,
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    },
}
# Architectures that llama.cpp writes: general.architecture, and whether its converter permutes q and k, and adds 1 to norms.
_GGUF = {
    "llama": (gguf.MODEL_ARCH.LLAMA, True, 0),
    "qwen2": (gguf.MODEL_ARCH.QWEN2, False, 0),
    "qwen3": (gguf.MODEL_ARCH.QWEN3, False, 0),
    "gemma2": (gguf.MODEL_ARCH.GEMMA2, False, 1),
    "gemma3_text": (gguf.MODEL_ARCH.GEMMA3, False, 1),
}


def make_tiny_family(path: Path, family: str, *, seed: int = 0, form: str = "safetensors", **changes: object) -> Path:
    """Write a model directory of ``FAMILIES[family]`` with fields changed; float32 weights, equal in both forms ("safetensors", "gguf")."""
    path.mkdir(parents=True, exist_ok=True)
    config = FAMILIES[family] | changes
    tensors = tiny_family_tensors(config, seed)
    write_tokenizer(path, _int(config, "vocab_size"))
    _write_json(path / "generation_config.json", {"eos_token_id": [IM_END_ID, ENDOFTEXT_ID]})
    if form == "gguf":
        write_family_gguf(path / "tiny.gguf", config, tensors)
        return path
    _write_json(path / "config.json", config)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


def tiny_family_tensors(config: Config, seed: int) -> dict[str, np.ndarray]:
    """Float32 tensors by the names that transformers gives them, so scaled that greedy output varies and logits are not near-tied."""
    rng = np.random.default_rng(seed)
    gemma = str(config["model_type"]).startswith("gemma")
    tensors = {}
    for name, shape in _shapes(json.dumps(config, sort_keys=True)):
        if name == "lm_head.weight" and config["tie_word_embeddings"]:
            continue
        if "norm" in name:
            # Steps of 2 ** -10: Gemma's weights survive GGUF's added 1 exactly, as those of real models, kept in bfloat16, do.
            values = np.round(rng.uniform(0.7, 1.3, shape) * 1024) / 1024
            if name == "model.norm.weight" and config["tie_word_embeddings"]:
                values *= rng.choice([-1, 1], shape)  # a tied head would otherwise echo the last token, over and over
            values -= gemma
        elif len(shape) == 1:
            values = rng.standard_normal(shape) * 0.2
        else:
            table = 0.1 if gemma else 0.4  # Gemma scales them up
            values = rng.standard_normal(shape) * (table if "embed" in name or "lm_head" in name else 1.5 / shape[1] ** 0.5)
        tensors[name] = values.astype(np.float32)
    return tensors


@cache
def _shapes(config: str) -> tuple[tuple[str, tuple[int, ...]], ...]:
    fields = json.loads(config)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(fields.pop("model_type"), **fields))
    return tuple((name, tuple(tensor.shape)) for name, tensor in sorted(model.state_dict().items()))


def write_family_gguf(
    file: Path,
    config: Config,
    tensors: Mapping[str, np.ndarray],
    *,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    rope_factors: np.ndarray | None = None,
) -> None:
    """A GGUF as llama.cpp's converter writes it; matrices stored as ``kind``, ``rope_factors`` as its rope_freqs.weight."""
    arch, permuted, norm_shift = _GGUF[str(config["model_type"])]
    num_layers = _int(config, "num_hidden_layers")
    heads = {"q_proj": _int(config, "num_attention_heads"), "k_proj": _int(config, "num_key_value_heads")}
    writer = gguf.GGUFWriter(file, gguf.MODEL_ARCH_NAMES[arch])
    writer.add_block_count(num_layers)
    writer.add_context_length(_int(config, "max_position_embeddings"))
    writer.add_embedding_length(_int(config, "hidden_size"))
    writer.add_feed_forward_length(_int(config, "intermediate_size"))
    writer.add_head_count(heads["q_proj"])
    writer.add_head_count_kv(heads["k_proj"])
    writer.add_key_length(_int(config, "head_dim"))
    writer.add_value_length(_int(config, "head_dim"))
    writer.add_layer_norm_rms_eps(_float(config, "rms_norm_eps"))
    if arch != gguf.MODEL_ARCH.GEMMA2:
        writer.add_rope_freq_base(_float(config, "rope_theta"))
    _add_rope_scaling(writer, config)
    if arch in (gguf.MODEL_ARCH.GEMMA2, gguf.MODEL_ARCH.GEMMA3):
        writer.add_sliding_window(_int(config, "sliding_window"))
    if arch == gguf.MODEL_ARCH.GEMMA2:
        writer.add_attn_logit_softcapping(_float(config, "attn_logit_softcapping"))
        writer.add_final_logit_softcapping(_float(config, "final_logit_softcapping"))
    add_gguf_tokenizer(writer, _int(config, "vocab_size"))
    names = gguf.get_tensor_name_map(arch, num_layers)
    for name, values in tensors.items():
        part = name.split(".")[-2]
        stored = permute(values, heads[part]) if permuted and part in heads else values
        stored = np.ascontiguousarray(stored + np.float32(norm_shift) if "norm" in name else stored)
        gguf_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if stored.ndim == 2 and kind != gguf.GGMLQuantizationType.F32:
            writer.add_tensor(gguf_name, gguf.quants.quantize(stored, kind), raw_dtype=kind)
        else:
            writer.add_tensor(gguf_name, stored)
    if rope_factors is not None:
        writer.add_tensor("rope_freqs.weight", rope_factors.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_rope_scaling(writer: gguf.GGUFWriter, config: Config) -> None:
    scaling = config.get("rope_scaling")
    if not isinstance(scaling, dict):
        return
    kind = scaling.get("rope_type", scaling.get("type"))
    if kind not in ("linear", "yarn"):
        return  # llama3 is a tensor, dynamic is nothing
    writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
    writer.add_rope_scaling_factor(scaling["factor"])
    if kind == "yarn":
        writer.add_rope_scaling_orig_ctx_len(scaling["original_max_position_embeddings"])


def _int(config: Config, field: str) -> int:
    value = config[field]
    assert isinstance(value, int)
    return value


def _float(config: Config, field: str) -> float:
    value = config[field]
    assert isinstance(value, int | float)
    return float(value)


def _write_json(file: Path, value: object) -> None:
    file.write_text(json.dumps(value, indent=1), encoding="utf-8")
