"""Stop strings: nothing of a match leaks, nothing is held back for nothing, and pieces do not matter."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdd.serving.text.stop_strings import StopStrings

TEXT = st.text(alphabet="abc", max_size=20)
STOPS = st.lists(st.text(alphabet="abc", min_size=1, max_size=4), max_size=3)


def run(stops: list[str], pieces: list[str], armed_from: int = 0) -> tuple[list[str], bool]:
    """Released texts, the rest at the end included; whether it stopped."""
    matcher = StopStrings(stops)
    released = []
    for index, piece in enumerate(pieces):
        step = matcher.push(piece, armed=index >= armed_from)
        released.append(step.text)
        if step.stopped:
            return released, True
    return [*released, matcher.finish()], False


def brute_force(stops: list[str], text: str, armed_from: int = 0) -> tuple[str, bool]:
    """Character by character: the first end at which a stop string is complete cuts at the earliest start of those."""
    for end in range(armed_from + 1, len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)], True
    return text, False


@given(STOPS, TEXT, st.data())
def test_any_cutting_into_pieces_equals_brute_force(stops: list[str], text: str, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    armed_from = data.draw(st.integers(0, len(pieces)))
    unarmed = len("".join(pieces[:armed_from]))
    released, stopped = run(stops, pieces, armed_from)
    assert ("".join(released), stopped) == brute_force(stops, text, unarmed)


@given(STOPS, TEXT)
def test_held_back_is_exactly_what_may_start_a_stop_string(stops: list[str], text: str) -> None:
    matcher = StopStrings(stops)
    out = ""
    for end, character in enumerate(text, 1):
        step = matcher.push(character)
        out += step.text
        if step.stopped:
            return
        held = text[len(out) : end]
        possible = [text[start:end] for start in range(end) if any(s != text[start:end] and s.startswith(text[start:end]) for s in stops)]
        assert held == (possible[0] if possible else "")


def test_a_stop_string_over_a_boundary_never_leaks() -> None:
    """Case 48: 'DEF' before the handoff, 'GHIJ' after it."""
    assert run(["DEFGHIJ"], ["ABC", "DEF", "GHI", "JKL"]) == (["ABC", "", "", ""], True)


def test_a_start_that_never_completes_is_released_later() -> None:
    assert run(["DEFGHIJ"], ["ABC", "DEF", "G!", "x"]) == (["ABC", "", "DEFG!", "x", ""], False)
    assert run(["DEFGHIJ"], ["ABCDEF"]) == (["ABC", "DEF"], False)


def test_the_stop_string_that_is_complete_first_wins() -> None:
    assert run(["abcd", "bc"], ["abcd"]) == (["a"], True)
    assert run(["bc", "abc"], ["xab", "c"]) == (["x", ""], True)


def test_a_match_that_did_not_count_never_will() -> None:
    """'b' was complete while unarmed and is still held back, as a part of 'abc'."""
    assert run(["abc", "b"], ["ab", "x"], armed_from=1) == (["", "abx", ""], False)
    assert run(["abc", "b"], ["ab", "c"], armed_from=1) == (["", ""], True)


def test_nothing_is_held_back_without_stop_strings() -> None:
    assert run([], ["a", "", "b"]) == (["a", "", "b", ""], False)


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^stop\[1\]: given ''"):
        StopStrings(["x", ""])
