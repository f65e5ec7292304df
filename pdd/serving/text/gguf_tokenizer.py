"""A tokenizer out of a GGUF file's metadata. Owns the mapping of llama.cpp's tokenizer kinds to the tokenizers library.

transformers can do this too, but needs torch and seconds to import, neither of which a coordinator has to spare.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import gguf
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

_SPACE: Final = "▁"
_UNKNOWN, _CONTROL, _USER_DEFINED = gguf.TokenType.UNKNOWN, gguf.TokenType.CONTROL, gguf.TokenType.USER_DEFINED
# Splits before byte-level BPE, from the tokenizer.json of Llama 3 and Qwen 2.
_LLAMA3_SPLIT: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT: Final = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")


@dataclass(frozen=True)
class GgufTokenizer:
    """``special_tokens``: "bos_token", "eos_token", ... to text, those the file names. ``chat_template`` None: it has none."""

    tokenizer: Tokenizer
    chat_template: str | None
    special_tokens: Mapping[str, str]


def read_gguf_tokenizer(file: Path) -> GgufTokenizer:
    """Raises ValueError, one line, for a file that is no GGUF, has no tokenizer, or one of an unsupported kind (named).

    The library builds a Python object per token and merge: 2 s for 49,152 tokens.
    """
    try:
        fields = gguf.GGUFReader(file).fields
    except (OSError, ValueError, IndexError, KeyError, OverflowError) as error:
        raise ValueError(f"tokenizer {file}: not a readable GGUF file: {' '.join(str(error).split())}") from error
    values = {key.removeprefix("tokenizer."): field.contents() for key, field in fields.items() if key.startswith("tokenizer.")}
    kind = values.get("ggml.model")
    builders = {"gpt2": _byte_level, "llama": _sentence_piece}
    if kind not in builders:
        raise ValueError(f"tokenizer {file}: tokenizer.ggml.model: given {kind!r}, allowed {sorted(builders)}")
    try:
        tokens = _strings(values, "ggml.tokens")
        types = _ints(values, "ggml.token_type")
        if len(types) != len(tokens):
            raise ValueError(f"tokenizer.ggml.token_type: {len(types)} given for {len(tokens)} tokens")
        tokenizer = builders[kind](values, tokens)
        _add_marked_tokens(tokenizer, tokens, types)
        special = _special_tokens(values, tokens)
        _add_bos_eos(tokenizer, values, special)
    except ValueError as error:
        raise ValueError(f"tokenizer {file}: {error}") from error
    template = values.get("chat_template")
    return GgufTokenizer(tokenizer, template if isinstance(template, str) else None, special)


def _byte_level(values: Mapping[str, object], tokens: Sequence[str]) -> Tokenizer:
    pre = values.get("ggml.pre")
    splits: dict[object, list[pre_tokenizers.PreTokenizer]] = {
        "smollm": [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)],
        "gpt-2": [pre_tokenizers.ByteLevel(add_prefix_space=False)],
        "llama-bpe": _regex_split(_LLAMA3_SPLIT),
        "qwen2": _regex_split(_QWEN2_SPLIT),
    }
    if pre not in splits:
        raise ValueError(f"tokenizer.ggml.pre: given {pre!r}, allowed {sorted(map(str, splits))}")
    merges = [_pair(merge) for merge in _strings(values, "ggml.merges")]
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre == "llama-bpe"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(splits[pre])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _regex_split(pattern: str) -> list[pre_tokenizers.PreTokenizer]:
    return [
        pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]


def _sentence_piece(values: Mapping[str, object], tokens: Sequence[str]) -> Tokenizer:
    """SentencePiece BPE joins the pair whose result has the best score, so scores give the order of merges."""
    scores = values.get("ggml.scores")
    if not isinstance(scores, list) or len(scores) != len(tokens):
        raise ValueError("tokenizer.ggml.scores: one number per token is expected")
    types = _ints(values, "ggml.token_type")
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    mergeable = [i for i, token in enumerate(tokens) if len(token) > 1 and types[i] == gguf.TokenType.NORMAL]
    merges: list[tuple[str, str]] = []
    for token_id in sorted(mergeable, key=lambda token_id: -scores[token_id]):
        token = tokens[token_id]
        pairs = [(token[:cut], token[cut:]) for cut in range(1, len(token)) if token[:cut] in vocab and token[cut:] in vocab]
        merges += sorted(pairs, key=lambda pair: (vocab[pair[0]], vocab[pair[1]]))
    unknown = next((token for token, kind in zip(tokens, types, strict=True) if kind == _UNKNOWN), None)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    prefix = values.get("ggml.add_space_prefix", True)
    tokenizer.normalizer = normalizers.Sequence(
        [*([normalizers.Prepend(_SPACE)] if prefix else []), normalizers.Replace(" ", _SPACE)],
    )
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    tokenizer.decoder = decoders.Sequence([decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    return tokenizer


def _add_marked_tokens(tokenizer: Tokenizer, tokens: Sequence[str], types: Sequence[int]) -> None:
    marked = [(token, kind) for token, kind in zip(tokens, types, strict=True) if kind in (_CONTROL, _UNKNOWN, _USER_DEFINED)]
    special = [AddedToken(token, special=True, normalized=False) for token, kind in marked if kind != _USER_DEFINED]
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token, kind in marked if kind == _USER_DEFINED])


def _special_tokens(values: Mapping[str, object], tokens: Sequence[str]) -> dict[str, str]:
    names = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    special: dict[str, str] = {}
    for name, variable in names.items():
        token_id = values.get(f"ggml.{name}_token_id")
        if token_id is None:
            continue
        if not isinstance(token_id, int) or not 0 <= token_id < len(tokens):
            raise ValueError(f"tokenizer.ggml.{name}_token_id: given {token_id!r}, allowed 0 to {len(tokens) - 1}")
        special[variable] = tokens[token_id]
    return special


def _add_bos_eos(tokenizer: Tokenizer, values: Mapping[str, object], special: Mapping[str, str]) -> None:
    default_bos = values["ggml.model"] == "llama"  # llama.cpp's default for SentencePiece vocabularies
    bos = special.get("bos_token") if values.get("ggml.add_bos_token", default_bos) else None
    eos = special.get("eos_token") if values.get("ggml.add_eos_token", False) else None
    set_bos_eos(tokenizer, bos, eos)


def set_bos_eos(tokenizer: Tokenizer, bos: str | None, eos: str | None) -> None:
    """Make ``encode(add_special)`` put ``bos`` before and ``eos`` behind, where given, and nothing else."""
    added = [token for token in (bos, eos) if token is not None]
    ids = [(token, tokenizer.token_to_id(token)) for token in added]
    for token, token_id in ids:
        if token_id is None:
            raise ValueError(f"special token {token!r} is not in the vocabulary")
    pieces = [*([bos] if bos is not None else []), "$A", *([eos] if eos is not None else [])]
    tokenizer.post_processor = processors.TemplateProcessing(single=pieces, special_tokens=ids)


def _strings(values: Mapping[str, object], key: str) -> list[str]:
    value = values.get(key)
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ValueError(f"tokenizer.{key}: a list of strings is expected")
    return value


def _ints(values: Mapping[str, object], key: str) -> list[int]:
    value = values.get(key)
    if not isinstance(value, list) or not all(isinstance(item, int) for item in value):
        raise ValueError(f"tokenizer.{key}: a list of integers is expected")
    return value


def _pair(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right
