"""Tiny Llama checkpoints with random weights and a byte-level tokenizer, in every file form the checkpoint reader knows.

The same arguments give the same weights in every ``form``, so a safetensors and a GGUF directory can be compared tensor by tensor.
Weights are scaled so that greedy output varies and logits are not near-tied.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Literal

import gguf
import ml_dtypes
import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers.convert_slow_tokenizer import bytes_to_unicode

Form = Literal["safetensors", "sharded", "gguf"]

ENDOFTEXT_ID = 0
IM_START_ID = 1
IM_END_ID = 2  # the model's eos
THINK_ID = 3  # user-defined, not special: it is text for the user
NUM_BASE_TOKENS = 260  # the four above and 256 bytes; merges and padding follow

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
THINK = "<think>"

# Merges of ASCII pairs ("Ġ" is a space): with the default vocab of 300 a few common pieces are one token, all else stays bytes.
_MERGES = (
    "Ġ t|h e|i n|e r|a n|Ġ a|o n|r e|Ġt he|a t|e n|o r|e s|i s|i t|Ġ s|Ġ w|n d|o u|in g"
    "|Ġ o|Ġ c|e d|a l|a r|l e|Ġ i|Ġ p|Ġ f|Ġ b|o m|l o|v e|an d|r o|Ġ m|a s|Ġ h|c h|l l|o t|l y|u r"
)
MERGES = tuple((left, right) for left, right in (pair.split(" ") for pair in _MERGES.split("|")))

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def make_tiny_llama(
    path: Path,
    *,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int | None = None,
    num_layers: int = 3,
    hidden: int = 64,
    intermediate: int = 96,
    vocab: int = 300,
    tie: bool = False,
    attention_bias: bool = False,
    mlp_bias: bool = False,
    rope_theta: float = 10_000.0,
    seed: int = 0,
    max_context: int = 512,
    form: Form = "safetensors",
    dtype: Literal["float32", "bfloat16", "float16"] = "float32",
) -> Path:
    """Write a model directory and return it. ``head_dim`` None means hidden // num_heads; any even value is allowed.

    ``vocab`` may exceed what the tokenizer names (padding ids without text), as real checkpoints do. ``dtype`` is that of the safetensors
    forms; GGUF is always written in F32. ``form="gguf"`` writes no config.json: architecture comes from the GGUF, as after ``pdd pull``.
    """
    path.mkdir(parents=True, exist_ok=True)
    head_dim = hidden // num_heads if head_dim is None else head_dim
    config: dict[str, object] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "vocab_size": vocab,
        "max_position_embeddings": max_context,
        "rms_norm_eps": 1e-5,
        "rope_theta": rope_theta,
        "tie_word_embeddings": tie,
        "attention_bias": attention_bias,
        "mlp_bias": mlp_bias,
        "bos_token_id": IM_START_ID,
        "eos_token_id": IM_END_ID,
        "torch_dtype": dtype,
    }
    tensors = tiny_tensors(config, seed)
    write_tokenizer(path, vocab)
    _write_json(path / "generation_config.json", {"bos_token_id": IM_START_ID, "eos_token_id": [IM_END_ID, ENDOFTEXT_ID]})
    if form == "gguf":
        write_gguf(path / "tiny.gguf", config, tensors)
        return path
    _write_json(path / "config.json", config)
    stored = np.dtype({"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}[dtype])
    tensors = {name: values.astype(stored) for name, values in tensors.items()}
    if form == "sharded":
        write_sharded(path, tensors, num_shards=3)
    else:
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


def tiny_tensors(config: dict[str, object], seed: int) -> dict[str, np.ndarray]:
    """Float32 tensors by Hugging Face name, linear weights [out, in]."""
    hidden, inner, vocab = _int(config, "hidden_size"), _int(config, "intermediate_size"), _int(config, "vocab_size")
    head_dim = _int(config, "head_dim")
    q_size, kv_size = _int(config, "num_attention_heads") * head_dim, _int(config, "num_key_value_heads") * head_dim
    rng = np.random.default_rng(seed)

    def normal(std: float, *shape: int) -> np.ndarray:
        return (rng.standard_normal(shape) * std).astype(np.float32)

    def norm_weight() -> np.ndarray:
        return rng.uniform(0.7, 1.3, hidden).astype(np.float32)

    tensors = {"model.embed_tokens.weight": normal(0.4, vocab, hidden)}
    for layer in range(_int(config, "num_hidden_layers")):
        p = f"model.layers.{layer}"
        tensors[f"{p}.input_layernorm.weight"] = norm_weight()
        tensors[f"{p}.post_attention_layernorm.weight"] = norm_weight()
        linears = {"self_attn.q_proj": (q_size, hidden), "self_attn.k_proj": (kv_size, hidden), "self_attn.v_proj": (kv_size, hidden)}
        linears |= {"self_attn.o_proj": (hidden, q_size)}
        linears |= {"mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner)}
        for name, (out_size, in_size) in linears.items():
            # gain 1.5: attention and MLP outweigh the embedding in the residual, so a tied head does not just echo its input
            tensors[f"{p}.{name}.weight"] = normal(1.5 / in_size**0.5, out_size, in_size)
            if config["attention_bias" if name.startswith("self_attn") else "mlp_bias"]:
                tensors[f"{p}.{name}.bias"] = normal(0.2, out_size)
    tensors["model.norm.weight"] = norm_weight()
    if not config["tie_word_embeddings"]:
        tensors["lm_head.weight"] = normal(0.4, vocab, hidden)
    return tensors


def write_sharded(path: Path, tensors: dict[str, np.ndarray], num_shards: int) -> None:
    """Shards and ``model.safetensors.index.json``; tensors are dealt out in turn, so each layer spans several shards."""
    weight_map: dict[str, str] = {}
    for shard in range(num_shards):
        file = f"model-{shard + 1:05d}-of-{num_shards:05d}.safetensors"
        part = {name: tensors[name] for i, name in enumerate(sorted(tensors)) if i % num_shards == shard}
        save_file(part, path / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    total = sum(values.nbytes for values in tensors.values())
    _write_json(path / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map})


def write_gguf(
    file: Path, config: dict[str, object], tensors: dict[str, np.ndarray], stored_as_is: Mapping[str, np.ndarray] = MappingProxyType({})
) -> None:
    """F32 GGUF as llama.cpp's converter writes it for ``llama``: q and k rows permuted from half-split to interleaved RoPE order.

    ``tensors`` have Hugging Face names; those of ``stored_as_is`` have GGUF names already.
    """
    num_heads, num_kv_heads = _int(config, "num_attention_heads"), _int(config, "num_key_value_heads")
    head_dim, num_layers = _int(config, "head_dim"), _int(config, "num_hidden_layers")
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_block_count(num_layers)
    writer.add_context_length(_int(config, "max_position_embeddings"))
    writer.add_embedding_length(_int(config, "hidden_size"))
    writer.add_feed_forward_length(_int(config, "intermediate_size"))
    writer.add_head_count(num_heads)
    writer.add_head_count_kv(num_kv_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(float(str(config["rope_theta"])))
    writer.add_layer_norm_rms_eps(float(str(config["rms_norm_eps"])))
    writer.add_vocab_size(_int(config, "vocab_size"))
    add_gguf_tokenizer(writer, _int(config, "vocab_size"))
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, num_layers)
    for name, values in tensors.items():
        stored = values
        if ".q_proj." in name:
            stored = permute(values, num_heads)
        elif ".k_proj." in name:
            stored = permute(values, num_kv_heads)
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight", ".bias")), np.ascontiguousarray(stored))
    for name, values in stored_as_is.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def permute(values: np.ndarray, num_heads: int) -> np.ndarray:
    """llama.cpp ``LlamaModel.permute``: rows of a head [2, dim/2] -> [dim/2, 2]."""
    halves = values.reshape(num_heads, 2, values.shape[0] // num_heads // 2, *values.shape[1:])
    return halves.swapaxes(1, 2).reshape(values.shape)


def token_strings(vocab: int) -> list[str]:
    """Token text by id as stored in tokenizer files, without padding: specials, bytes in GPT-2's alphabet, merges."""
    if vocab < NUM_BASE_TOKENS:
        raise ValueError(f"vocab: given {vocab}, at least {NUM_BASE_TOKENS}")
    alphabet = bytes_to_unicode()
    merged = [left + right for left, right in _merges_for(vocab)]
    return [*SPECIALS, THINK, *(alphabet[byte] for byte in range(256)), *merged]


def write_tokenizer(path: Path, vocab: int) -> None:
    """``tokenizer.json`` and ``tokenizer_config.json`` (with the chat template) for transformers' AutoTokenizer."""
    bpe = models.BPE(vocab={text: i for i, text in enumerate(token_strings(vocab))}, merges=list(_merges_for(vocab)))
    tokenizer = Tokenizer(bpe)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIALS])
    tokenizer.add_tokens([AddedToken(THINK, special=False, normalized=False)])
    tokenizer.save(str(path / "tokenizer.json"))
    _write_json(
        path / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<|im_start|>",
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "unk_token": "<|endoftext|>",
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        },
    )


def add_gguf_tokenizer(writer: gguf.GGUFWriter, vocab: int) -> None:
    """The tokenizer of :func:`write_tokenizer` as GGUF metadata."""
    texts = token_strings(vocab)
    kinds = [gguf.TokenType.CONTROL] * len(SPECIALS) + [gguf.TokenType.USER_DEFINED]
    kinds += [gguf.TokenType.NORMAL] * (len(texts) - len(kinds))
    padding = [f"[PAD{i}]" for i in range(len(texts), vocab)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(texts + padding)
    writer.add_token_types(kinds + [gguf.TokenType.UNUSED] * len(padding))
    writer.add_token_merges([f"{left} {right}" for left, right in _merges_for(vocab)])
    writer.add_bos_token_id(IM_START_ID)
    writer.add_eos_token_id(IM_END_ID)
    writer.add_unk_token_id(ENDOFTEXT_ID)
    writer.add_pad_token_id(ENDOFTEXT_ID)
    writer.add_add_bos_token(False)
    writer.add_add_space_prefix(False)
    writer.add_chat_template(CHAT_TEMPLATE)


def _merges_for(vocab: int) -> tuple[tuple[str, str], ...]:
    return MERGES[: max(0, vocab - NUM_BASE_TOKENS)]


def _int(config: dict[str, object], field: str) -> int:
    value = config[field]
    assert isinstance(value, int)
    return value


def _write_json(file: Path, value: object) -> None:
    file.write_text(json.dumps(value, indent=1), encoding="utf-8")
