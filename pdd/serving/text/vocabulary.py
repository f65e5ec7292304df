"""The bytes that each token id stands for, derived from the tokenizer's own decoder. Owns the knowledge of decoder kinds.

A decoder is understood or refused by name: text made from a guess would be wrong for some inputs only. Byte-level BPE (GPT-2, Llama 3,
SmolLM, Qwen) and SentencePiece style (Llama 2, Mistral: a marker for spaces, ``<0xE2>`` byte tokens, a dropped leading space) cover the
Llama family.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from tokenizers import Tokenizer

_BYTE_TOKEN: Final = re.compile(r"<0x([0-9A-F]{2})>")
_SUPPORTED: Final = "ByteLevel, Metaspace, or a Sequence of Replace (one character), ByteFallback, Fuse, Strip (leading spaces, after Fuse)"


@dataclass(frozen=True)
class _Scheme:
    """``token``: a token's bytes anywhere but at the start. ``first``: its bytes as the first token of a text. ``strip_spaces``: how many
    leading spaces a whole text loses."""

    token: Callable[[str], bytes]
    first: Callable[[str], bytes]
    strip_spaces: int = 0


class Vocabulary:
    """Ids in [0, ``size``); ids without a token (padding of the embedding) stand for nothing."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Raises ValueError naming a decoder that is not understood."""
        scheme = _scheme(json.loads(tokenizer.to_str())["decoder"])
        tokens = {token_id: token for token, token_id in tokenizer.get_vocab(with_added_tokens=True).items()}
        self.size = max(tokens, default=-1) + 1
        self.strip_spaces = scheme.strip_spaces
        self.special_ids = frozenset(i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special)
        self._first = scheme.first
        self._tokens = tokens
        self._bytes = {token_id: scheme.token(token) for token_id, token in tokens.items()}

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes of any token, special ones included; empty for an id without a token."""
        return self._bytes.get(token_id, b"")

    def makes_text(self, token_id: int) -> bool:
        """Whether the id has a token that appears in text: special tokens do not."""
        return token_id in self._bytes and token_id not in self.special_ids

    def first_token_bytes(self, token_id: int) -> bytes:
        """Bytes of a token with which a text starts."""
        return self._first(self._tokens[token_id]) if token_id in self._tokens else b""


def byte_level_alphabet() -> dict[str, int]:
    """Character -> byte of byte-level BPE (``bytes_to_unicode`` in GPT-2's encoder.py): printable Latin-1 stands for itself, the other
    bytes for U+0100 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def _scheme(decoder: Mapping[str, object] | None) -> _Scheme:
    kind = None if decoder is None else decoder["type"]
    if decoder is not None and kind == "ByteLevel":
        alphabet = byte_level_alphabet()

        def byte_level(token: str) -> bytes:
            # As the tokenizers library does: a token with any character outside the alphabet (an added token) is its own text.
            mapped = [alphabet.get(character) for character in token]
            return token.encode() if None in mapped else bytes(byte for byte in mapped if byte is not None)

        return _Scheme(byte_level, byte_level)
    if decoder is not None and kind == "Metaspace":
        marker = str(decoder["replacement"])
        at_start = " " if decoder["prepend_scheme"] == "never" else ""
        return _Scheme(lambda token: token.replace(marker, " ").encode(), lambda token: token.replace(marker, at_start).encode())
    if decoder is not None and kind == "Sequence":
        steps = decoder["decoders"]
        assert isinstance(steps, list)
        return _sequence(steps)
    raise ValueError(f"tokenizer: decoder {kind!r} is not supported, allowed {_SUPPORTED}")


def _sequence(steps: Iterable[Mapping[str, object]]) -> _Scheme:
    replacements: list[tuple[str, str]] = []
    byte_fallback = fused = False
    strip_spaces = 0
    for step in steps:
        match step:
            case {"type": "Replace", "pattern": {"String": str(pattern)}, "content": str(content)} if len(pattern) == 1:
                replacements.append((pattern, content))
            case {"type": "ByteFallback"}:
                byte_fallback = True
            case {"type": "Fuse"}:
                fused = True
            case {"type": "Strip", "content": " ", "start": int(start), "stop": 0} if fused:
                strip_spaces += start
            case _:
                raise ValueError(f"tokenizer: decoder step {dict(step)} is not supported, allowed {_SUPPORTED}")

    def token_bytes(token: str) -> bytes:
        byte = _BYTE_TOKEN.fullmatch(token) if byte_fallback else None
        if byte is not None:
            return bytes([int(byte[1], 16)])
        for pattern, content in replacements:
            token = token.replace(pattern, content)
        return token.encode()

    return _Scheme(token_bytes, token_bytes, strip_spaces)
