"""What a model directory says about text: tokenizer, chat template, special tokens, end-of-sequence ids. Owns which file wins."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from pdd.serving.text.gguf_tokenizer import read_gguf_tokenizer, set_bos_eos
from pddbridge.checkpoint_gguf import GgufSource
from pddbridge.eos_files import eos_ids_beside_weights, read_json_object
from pddbridge.model_spec_fields import token_ids


@dataclass(frozen=True)
class TextFiles:
    """``chat_template`` None: the model has none. ``special_tokens``: template variable ("bos_token") to text."""

    tokenizer: Tokenizer
    chat_template: str | None
    special_tokens: Mapping[str, str]
    eos_token_ids: frozenset[int]


def read_text_files(model_dir: Path) -> TextFiles:
    """``tokenizer.json`` and its companions, else the one ``.gguf`` file. Raises ValueError, one line, when neither can be used."""
    ggufs = sorted(model_dir.glob("*.gguf"))
    if (model_dir / "tokenizer.json").is_file():
        return _from_json_files(model_dir)
    if len(ggufs) == 1:
        found = read_gguf_tokenizer(ggufs[0])
        return TextFiles(found.tokenizer, found.chat_template, found.special_tokens, _eos_token_ids(model_dir))
    raise ValueError(f"tokenizer {model_dir}: need tokenizer.json or exactly one .gguf file, found {[file.name for file in ggufs]}")


def _from_json_files(model_dir: Path) -> TextFiles:
    file = model_dir / "tokenizer.json"
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception for whatever is wrong with the file
        raise ValueError(f"tokenizer {file}: {' '.join(str(error).split())}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    config = _optional_json(model_dir / "tokenizer_config.json")
    special = _special_tokens(_optional_json(model_dir / "special_tokens_map.json")) | _special_tokens(config)
    if any(isinstance(config.get(field), bool) for field in ("add_bos_token", "add_eos_token")):
        # As transformers does: said explicitly, it overrules the post-processor of tokenizer.json.
        bos = special.get("bos_token") if config.get("add_bos_token") else None
        eos = special.get("eos_token") if config.get("add_eos_token") else None
        set_bos_eos(tokenizer, bos, eos)
    return TextFiles(tokenizer, _chat_template(model_dir, config), special, _eos_token_ids(model_dir))


def _chat_template(model_dir: Path, config: Mapping[str, object]) -> str | None:
    """``chat_template.jinja`` before ``tokenizer_config.json``; of several named templates the one named "default"."""
    file = model_dir / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    if template is not None and not isinstance(template, str):
        raise ValueError(f"{model_dir / 'tokenizer_config.json'}: chat_template: given {type(template).__name__}, a string is expected")
    return template


def _eos_token_ids(model_dir: Path) -> frozenset[int]:
    """Union of every file that names one. Weights are not opened, so a front door needs only a model's small files (or its GGUF)."""
    ids = set(eos_ids_beside_weights(model_dir))
    ids.update(token_ids(_optional_json(model_dir / "config.json"), "eos_token_id"))
    for file in model_dir.glob("*.gguf"):
        ids.update(GgufSource(file).spec.eos_token_ids)
    return frozenset(ids)


def _special_tokens(config: Mapping[str, object]) -> dict[str, str]:
    """Entries such as ``"bos_token": "<s>"`` or ``{"content": "<s>", ...}``."""
    special: dict[str, str] = {}
    for name, value in config.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            special[name] = text
    return special


def _optional_json(file: Path) -> Mapping[str, object]:
    return read_json_object(file) if file.is_file() else {}
