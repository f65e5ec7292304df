"""Small tokenizers in the shapes that models have: byte-level BPE, SentencePiece with byte tokens, Metaspace."""

from __future__ import annotations

from typing import Literal

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from pdd.serving.text.vocabulary import byte_level_alphabet

TokenizerKind = Literal["byte_level", "sentence_piece", "metaspace"]
SPECIALS = ("<s>", "</s>")
THINK = "<think>"
WORDS = ("▁", "he", "▁he", "▁▁", "llo", "l", "o", "é", "日本", "😀", "▁a▁", "\n", "x", ".", "h", "e", "a")


def byte_level_tokenizer() -> Tokenizer:
    """Ids: 0 ``<s>``, 1 ``</s>``, 2 ``<think>`` (user-defined), 3 + byte, then a few merges."""
    alphabet = {byte: character for character, byte in byte_level_alphabet().items()}
    merges = [("Ġ", "h"), ("h", "e"), ("Ġh", "e"), ("l", "l"), ("Ã", "©")]
    tokens = [*SPECIALS, THINK, *(alphabet[byte] for byte in range(256)), *(left + right for left, right in merges)]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return _with_added(tokenizer)


def sentence_piece_tokenizer() -> Tokenizer:
    """As Llama 2's: ids 0 to 2 as above, 3 + byte are ``<0xHH>``, then words; a whole text loses one leading space."""
    tokens = [*SPECIALS, THINK, *(f"<0x{byte:02X}>" for byte in range(256)), *WORDS]
    vocab = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[("h", "e"), ("▁", "he")], fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    return _with_added(tokenizer)


def metaspace_tokenizer() -> Tokenizer:
    """Ids 0 to 2 as above, then words; the first token of a text loses its markers."""
    tokens = [*SPECIALS, THINK, *WORDS]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[("h", "e"), ("▁", "he")]))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return _with_added(tokenizer)


def _with_added(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIALS])
    tokenizer.add_tokens([AddedToken(THINK, special=False, normalized=False)])
    return tokenizer
