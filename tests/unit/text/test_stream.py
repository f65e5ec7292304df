"""Accepted ids to released text: stop strings over token boundaries, min_tokens, and every handoff point alike."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdd.serving.text.model import TextModel
from pdd.serving.text.stream import TextStream
from tests.support.tokenizers import byte_level_tokenizer

MODEL = TextModel(byte_level_tokenizer(), None, frozenset({1}))
EOS = 1


def ids(text: str) -> list[int]:
    return [3 + byte for byte in text.encode()]


PROMPT = ids("prompt ")


def run(stream: TextStream, log: list[int]) -> tuple[list[str], int]:
    """Texts by token with ``finish`` as the last unless stopped, and the number of tokens accepted."""
    texts: list[str] = []
    for count, token_id in enumerate(log, 1):
        step = stream.push(token_id)
        texts.append(step.text)
        if step.stopped:
            return texts, count
    return [*texts, stream.finish()], len(log)


@pytest.mark.parametrize("handoff", range(12))
def test_a_stop_string_cuts_alike_wherever_the_log_was_handed_over(handoff: int) -> None:
    """Cases 48 and 49: one owner of the text; tokens from either worker; it stops in the middle of the second one's tokens."""
    log = ids("ABCDEFGHIJKLM")
    reference, count = run(TextStream(MODEL, PROMPT, ["DEFGHIJ"]), log)
    assert ("".join(reference), count) == ("ABC", 10)
    if handoff <= 9:
        resumed = TextStream.resume(MODEL, PROMPT, ["DEFGHIJ"], 0, log[:handoff])
        assert run(resumed, log[handoff:]) == (reference[handoff:], count - handoff)


def test_after_a_stop_nothing_more_comes() -> None:
    stream = TextStream(MODEL, PROMPT, ["b"])
    run(stream, ids("ab"))
    assert stream.finish() == ""
    with pytest.raises(AssertionError):
        stream.push(3)


@pytest.mark.parametrize(
    ("min_tokens", "expected", "count"),
    [(0, "x", 4), (3, "x", 4), (4, "xENDy", 8), (7, "xENDy", 8), (8, "xENDyENDz", 9), (9, "xENDyENDz", 9)],
)
def test_min_tokens_suppresses_stop_strings(min_tokens: int, expected: str, count: int) -> None:
    """The two stop strings are complete with tokens 4 and 8."""
    texts, accepted = run(TextStream(MODEL, PROMPT, ["END"], min_tokens), ids("xENDyENDz"))
    assert ("".join(texts), accepted) == (expected, count)


def test_a_stop_string_across_the_min_tokens_border_is_cut_whole() -> None:
    assert run(TextStream(MODEL, PROMPT, ["END"], 3), ids("xENDy")) == (["x", "", "", ""], 4)
    assert run(TextStream(MODEL, PROMPT, ["END"], 2), ids("ENx")) == (["", "", "ENx", ""], 3)


def test_a_token_that_ends_the_request_makes_no_text() -> None:
    stream = TextStream(MODEL, PROMPT, ["bc"])
    assert stream.push(ids("a")[0]).text == "a"
    assert stream.push(ids("b")[0]).text == ""
    assert stream.push(ids("c")[0], ends=True).stopped is False
    assert stream.finish() == "b"
    eos = TextStream(MODEL, PROMPT)
    assert run(eos, [*ids("a"), EOS]) == (["a", "", ""], 2)


def test_the_end_releases_incomplete_characters_and_starts_of_stop_strings() -> None:
    stream = TextStream(MODEL, PROMPT, ["EN�", "END"])
    assert run(stream, [*ids("xE"), ids("😀")[0]]) == (["x", "", "", "E�"], 3)
    assert run(TextStream(MODEL, PROMPT, ["E�"]), [*ids("xE"), ids("😀")[0]]) == (["x", "", "", ""], 3)


def test_characters_released_are_counted() -> None:
    stream = TextStream(MODEL, PROMPT, ["zz"])
    texts, _ = run(stream, ids("a😀éz"))
    assert stream.num_chars == len("".join(texts)) == 4


@pytest.mark.parametrize(("stop", "line"), [("", r"^stop\[1\]: given ''"), ("\ud800x", r"^stop\[1\]: given lone surrogate U\+D800")])
def test_bad_stop_strings_are_refused(stop: str, line: str) -> None:
    with pytest.raises(ValueError, match=line):
        TextStream(MODEL, PROMPT, ["ok", stop])


@given(
    st.lists(st.integers(0, MODEL.vocab_size + 2), max_size=12),
    st.lists(st.text(alphabet="he l�é", min_size=1, max_size=3), max_size=2),
    st.integers(0, 6),
    st.integers(0, 12),
)
@settings(max_examples=200, deadline=None)
def test_resume_at_any_point_equals_one_stream(log: list[int], stops: list[str], min_tokens: int, handoff: int) -> None:
    whole, count = run(TextStream(MODEL, PROMPT, stops, min_tokens), log)
    if handoff >= count:
        return
    resumed = TextStream.resume(MODEL, PROMPT, stops, min_tokens, log[:handoff])
    assert run(resumed, log[handoff:]) == (whole[handoff:], count - handoff)
