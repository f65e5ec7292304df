"""Deltas together are the full decode, for every tokenizer shape, from every restart; prompt text never comes out."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from pdd.serving.text.detokenizer import Detokenizer
from pdd.serving.text.vocabulary import Vocabulary
from tests.support.tokenizers import WORDS, byte_level_tokenizer, metaspace_tokenizer, sentence_piece_tokenizer

TOKENIZERS: dict[str, Tokenizer] = {
    "byte_level": byte_level_tokenizer(),
    "sentence_piece": sentence_piece_tokenizer(),
    "metaspace": metaspace_tokenizer(),
}
VOCABULARIES = {kind: Vocabulary(tokenizer) for kind, tokenizer in TOKENIZERS.items()}
BYTE = 3  # id of byte 0 in byte_level and sentence_piece
EMOJI = [BYTE + byte for byte in "😀".encode()]
SPECIAL_ID = 1


def run(vocabulary: Vocabulary, prompt: list[int], log: list[int]) -> list[str]:
    detokenizer = Detokenizer(vocabulary, prompt)
    return [*(detokenizer.push(token_id) for token_id in log), detokenizer.finish()]


def id_lists(kind: str) -> st.SearchStrategy[list[int]]:
    """Random ids, specials and ids beyond the vocabulary included, with whole characters in bytes made likely."""
    size = VOCABULARIES[kind].size
    pieces = [st.integers(0, size + 3).map(lambda i: [i])]
    if kind != "metaspace":
        characters = st.sampled_from(["é", "日", "😀", " ", "a"]).map(lambda text: [BYTE + byte for byte in text.encode()])
        words = st.integers(BYTE + 256, size - 1).map(lambda i: [i])
        pieces += [characters, words]
    return st.lists(st.one_of(pieces), max_size=14).map(lambda parts: [token_id for part in parts for token_id in part])


def plain_bytes(kind: str, ids: list[int]) -> bytes:
    """Bytes of tokens in the middle of a text: byte tokens by their id, the others (all valid UTF-8) through the library, one by one."""
    tokenizer = TOKENIZERS[kind]
    out = b""
    for token_id in ids:
        token = tokenizer.id_to_token(token_id)
        if BYTE <= token_id < BYTE + 256:
            out += bytes([token_id - BYTE])
        elif token is not None and token_id not in (0, 1):
            out += (token.replace("▁", " ") if kind == "sentence_piece" else tokenizer.decode([token_id])).encode()
    return out


@pytest.mark.parametrize("kind", TOKENIZERS)
@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_deltas_together_are_the_librarys_decode(kind: str, data: st.DataObject) -> None:
    """Case 52: without a prompt the whole text must be the tokenizers library's own, invalid bytes included."""
    ids = data.draw(id_lists(kind))
    text = "".join(run(VOCABULARIES[kind], [], ids))
    expected = TOKENIZERS[kind].decode(ids, skip_special_tokens=True)
    if kind == "sentence_piece" and "�" in expected:
        # The library throws away valid characters beside an invalid byte; here they stay.
        expected = plain_bytes(kind, ids).removeprefix(b" ").decode("utf-8", errors="replace")
    assert text == expected


@pytest.mark.parametrize("kind", TOKENIZERS)
@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_after_a_prompt_the_deltas_are_what_it_adds(kind: str, data: st.DataObject) -> None:
    """The prompt's text is never repeated, and leading spaces of the first token are kept."""
    prompt, log = data.draw(id_lists(kind)), data.draw(id_lists(kind))
    tokenizer = TOKENIZERS[kind]
    text = "".join(run(VOCABULARIES[kind], prompt, log))
    before, after = tokenizer.decode(prompt, skip_special_tokens=True), tokenizer.decode(prompt + log, skip_special_tokens=True)
    if "�" not in before + after:
        assert before + text == after
        return
    # Invalid bytes, or a character across the border. Its last bytes, if the log starts with them, are one character at most each.
    given = plain_bytes(kind, prompt)
    added = plain_bytes(kind, log) if given or kind == "byte_level" else plain_bytes(kind, log).removeprefix(b" ")
    whole = (given + added).decode("utf-8", errors="replace")
    rest = added.lstrip(bytes(range(0x80, 0xC0)))
    assert whole.endswith(text)
    assert text.endswith(rest.decode("utf-8", errors="replace"))
    assert len(text) <= len(rest.decode("utf-8", errors="replace")) + len(added) - len(rest)


@pytest.mark.parametrize("kind", TOKENIZERS)
@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_a_restart_at_every_index_changes_nothing(kind: str, data: st.DataObject) -> None:
    """Case 52: the state after k tokens is a function of (prompt, log), so another process goes on with the same deltas."""
    prompt, log = data.draw(id_lists(kind)), data.draw(id_lists(kind))
    whole = run(VOCABULARIES[kind], prompt, log)
    for k in range(len(log) + 1):
        resumed = Detokenizer(VOCABULARIES[kind], prompt)
        for token_id in log[:k]:
            resumed.push(token_id)
        rest = [*(resumed.push(token_id) for token_id in log[k:]), resumed.finish()]
        assert rest == whole[k:]


@pytest.mark.parametrize("kind", ["byte_level", "sentence_piece"])
@pytest.mark.parametrize("in_prompt", [0, 1, 2, 3, 4])
def test_a_prompt_that_ends_inside_a_character(kind: str, in_prompt: int) -> None:
    """Case 50: the rest of the character arrives: the character or nothing comes out, and no prompt text."""
    prompt = [BYTE + byte for byte in b"secret "] + EMOJI[:in_prompt]
    pieces = run(VOCABULARIES[kind], prompt, [*EMOJI[in_prompt:], BYTE + ord("!")])
    assert "".join(pieces) == ("!" if in_prompt == 4 else "😀!")
    assert all("secret" not in piece and len(piece) <= 1 for piece in pieces)


@pytest.mark.parametrize("kind", ["byte_level", "sentence_piece"])
def test_bytes_that_the_prompt_left_behind_are_not_shown(kind: str) -> None:
    vocabulary = VOCABULARIES[kind]
    exclamation = BYTE + ord("!")
    assert run(vocabulary, EMOJI[:2], [exclamation]) == ["!", ""]
    assert run(vocabulary, EMOJI[:2], []) == [""]
    assert run(vocabulary, EMOJI[:2], [SPECIAL_ID, 10_000]) == ["", "", ""]
    assert run(vocabulary, EMOJI[:2], EMOJI) == ["", "", "", "😀", ""]
    # One byte of the output is part of the broken character: it shows, once.
    assert run(vocabulary, EMOJI[:2], [EMOJI[2], exclamation]) == ["", "�!", ""]
    # A replacement character that the output completes is real text.
    replacement = [BYTE + byte for byte in "�".encode()]
    assert run(vocabulary, replacement[:2], replacement[2:]) == ["�", ""]


@pytest.mark.parametrize("kind", ["byte_level", "sentence_piece"])
def test_incomplete_characters_are_held_back_and_shown_at_the_end(kind: str) -> None:
    assert run(VOCABULARIES[kind], [BYTE + ord("a")], [BYTE + ord("b"), *EMOJI[:3]]) == ["b", "", "", "", "�"]
    assert run(VOCABULARIES[kind], [BYTE + ord("a")], [*EMOJI[:2], BYTE + ord("b")]) == ["", "", "�b", ""]


def test_leading_spaces() -> None:
    hello = 3 + 256 + WORDS.index("▁he")
    two_spaces = 3 + 256 + WORDS.index("▁▁")
    a = BYTE + ord("a")
    vocabulary = VOCABULARIES["sentence_piece"]
    assert run(vocabulary, [a], [hello, hello]) == [" he", " he", ""]
    assert run(vocabulary, [0], [hello, hello]) == ["he", " he", ""]  # only <s> before: the text starts here
    assert run(vocabulary, [two_spaces], [hello]) == [" he", ""]
    assert run(vocabulary, [], [two_spaces, hello]) == [" ", " he", ""]
    metaspace = VOCABULARIES["metaspace"]
    assert run(metaspace, [3 + WORDS.index("x")], [3 + WORDS.index("▁▁")]) == ["  ", ""]
    assert run(metaspace, [0], [3 + WORDS.index("▁▁"), 3 + WORDS.index("▁he")]) == ["", " he", ""]


def test_special_tokens_are_silent_and_user_defined_ones_are_text() -> None:
    assert run(VOCABULARIES["byte_level"], [BYTE], [0, 2, 1, 9999]) == ["", "<think>", "", "", ""]
    assert VOCABULARIES["byte_level"].token_bytes(1) == b"</s>"


@pytest.mark.parametrize(
    "decoder",
    [
        None,
        decoders.WordPiece(),
        decoders.Sequence([decoders.Strip(" ", 1, 0), decoders.Fuse()]),
        decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 0, 1)]),
        decoders.Sequence([decoders.Replace("ab", "c"), decoders.Fuse()]),
        decoders.CTC(),
    ],
)
def test_decoders_that_are_not_understood_are_refused(decoder: decoders.Decoder | None) -> None:
    tokenizer = Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    if decoder is not None:
        tokenizer.decoder = decoder
    with pytest.raises(ValueError, match=r"^tokenizer: decoder .* is not supported, allowed ByteLevel, Metaspace"):
        Vocabulary(tokenizer)
