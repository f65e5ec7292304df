"""End-of-sequence ids that a model directory's JSON files name: generation_config.json and the tokenizer's own files.

The stop set of a model is the union of every source (see :class:`pddbridge.model_spec.ModelSpec`);
this module owns those beside the weights.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from pddbridge.checkpoint_source import CheckpointError
from pddbridge.model_spec_fields import token_ids


def read_json_object(file: Path) -> Mapping[str, object]:
    """Raises CheckpointError, one line, when the file cannot be read or is not a JSON object."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{file}: {error.strerror}") from error
    except ValueError as error:
        raise CheckpointError(f"{file}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{file}: a JSON object is expected, given {type(value).__name__}")
    return value


def eos_ids_beside_weights(model_dir: Path) -> frozenset[int]:
    """Ids from ``generation_config.json`` (an int, a list or nothing) and the tokenizer's ``eos_token``; files that are absent add nothing.

    Raises ValueError for a malformed field, or an ``eos_token`` that the tokenizer has no id for.
    """
    generation = model_dir / "generation_config.json"
    ids = set(token_ids(read_json_object(generation), "eos_token_id")) if generation.is_file() else set()
    for file in (model_dir / "tokenizer_config.json", model_dir / "special_tokens_map.json"):
        if not file.is_file():
            continue
        text = _eos_text(file)
        if text is not None:
            ids.add(_token_id(model_dir, text, file))
    return frozenset(ids)


def _eos_text(file: Path) -> str | None:
    value = read_json_object(file).get("eos_token")
    if isinstance(value, dict):  # an AddedToken, written out
        value = value.get("content")
    if value is not None and not isinstance(value, str):
        raise ValueError(f"{file}: eos_token: given {value!r}, allowed: a string, an object with content, or null")
    return value


def _token_id(model_dir: Path, text: str, named_by: Path) -> int:
    """Looks in ``added_tokens_decoder`` first: special tokens of every current tokenizer are there or in tokenizer.json."""
    decoder = read_json_object(named_by).get("added_tokens_decoder")
    if isinstance(decoder, dict):
        for token_id, token in decoder.items():
            if isinstance(token, dict) and token.get("content") == text and token_id.isdecimal():
                return int(token_id)
    tokenizer_file = model_dir / "tokenizer.json"
    if tokenizer_file.is_file():
        tokenizer = read_json_object(tokenizer_file)
        added = tokenizer.get("added_tokens")
        for token in added if isinstance(added, list) else ():
            if isinstance(token, dict) and token.get("content") == text and isinstance(token.get("id"), int):
                return int(token["id"])
        model = tokenizer.get("model")
        vocab = model.get("vocab") if isinstance(model, dict) else None
        if isinstance(vocab, dict) and isinstance(vocab.get(text), int):
            return int(vocab[text])
    raise ValueError(f"{named_by}: eos_token: given {text!r}, which the tokenizer has no id for")
