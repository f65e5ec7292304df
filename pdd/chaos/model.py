"""The tiny model that chaos runs on when it is given none: random weights, a tokenizer whose tokens are bytes. Takes no download."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from pdd.serving.text.vocabulary import byte_level_alphabet
from pddbridge.model_spec_hf import from_hf_config
from pddbridge.random_checkpoint import RandomCheckpoint

SPECIALS = ("<s>", "</s>")
EOS_ID = 1
VOCAB_SIZE = 264  # the two specials, 256 bytes, six ids that stand for nothing, as real checkpoints have them
MAX_CONTEXT = 640


def byte_id(character: str) -> int:
    """The token of an ASCII character."""
    return len(SPECIALS) + ord(character)


def make_model(path: Path, seed: int = 0) -> Path:
    """Write a model directory of about 300 kB and return it: 3 layers, 6 heads of 16 over 3 KV heads, float32."""
    path.mkdir(parents=True, exist_ok=True)
    config: dict[str, object] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "head_dim": 16,
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": MAX_CONTEXT,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": EOS_ID,
        "torch_dtype": "float32",
    }
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    weights = RandomCheckpoint(from_hf_config(config), seed)
    save_file({name: weights.load(name) for name in weights.names}, path / "model.safetensors", metadata={"format": "pt"})
    _write_tokenizer(path)
    return path


def _write_tokenizer(path: Path) -> None:
    alphabet = {byte: character for character, byte in byte_level_alphabet().items()}
    tokens = [*SPECIALS, *(alphabet[byte] for byte in range(256))]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIALS])
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"bos_token": SPECIALS[0], "eos_token": SPECIALS[1]}), encoding="utf-8")
