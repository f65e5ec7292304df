"""The one "token accepted" function: log, stop rules, text and end, the same whoever proposed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdd.serving.acceptor import Acceptor
from pdd.serving.request import Delta
from pdd.serving.text.model import TextModel
from pdd.serving.token_log import TokenLogError
from pddbridge.sampling_params import TokenRecord
from tests.support.generation import EOS, make_request, params
from tests.support.tiny_models import IM_END_ID, THINK_ID, make_tiny_llama


@pytest.fixture(scope="module")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return TextModel.load(make_tiny_llama(tmp_path_factory.mktemp("tiny") / "model"))


def feed(acceptor: Acceptor, ids: list[int], handoff_at: int) -> list[Delta]:
    """Propose ``ids`` as relay and main would: the relay's last token comes again from main."""
    deltas = []
    for position, token_id in enumerate(ids):
        origin = "relay" if position < handoff_at else "main"
        if position == handoff_at and position > 0:
            assert acceptor.accept(position - 1, TokenRecord(ids[position - 1]), "main") is None
        delta = acceptor.accept(position, TokenRecord(token_id), origin)
        if delta is None:
            break
        deltas.append(delta)
    return deltas


@given(
    ids=st.lists(st.integers(0, 6), min_size=1, max_size=12),
    max_tokens=st.integers(1, 12),
    min_tokens=st.integers(0, 4),
    ignore=st.booleans(),
)
def test_the_end_is_the_same_for_every_handoff_position(ids: list[int], max_tokens: int, min_tokens: int, ignore: bool) -> None:
    """Cases 41 to 44, against the rules written out once more."""
    end = next(
        (
            n
            for n in range(1, len(ids) + 1)
            if n == max_tokens or (n > min_tokens and (ids[n - 1] == 5 or (ids[n - 1] == EOS and not ignore)))
        ),
        None,
    )
    sampling = params(max_tokens, min_tokens=min_tokens, ignore_eos=ignore, stop_token_ids=frozenset({5}))
    for k in range(len(ids) + 1):
        acceptor = Acceptor(make_request(sampling=sampling), None)
        deltas = feed(acceptor, ids, k)
        assert [r.token_id for d in deltas for r in d.records] == ids[:end]
        assert [d.origin for d in deltas] == ["relay" if n < k else "main" for n in range(len(deltas))]
        assert [d.finish_reason is not None for d in deltas] == [n + 1 == end for n in range(len(deltas))]
        if end is not None:
            stopped = end > min_tokens and (ids[end - 1] == 5 or (ids[end - 1] == EOS and not ignore))
            assert acceptor.finish_reason == ("stop" if stopped else "length")
            assert acceptor.accept(end, TokenRecord(1), "main") is None
            assert len(acceptor.log) == end


def test_a_stop_id_makes_no_text_but_counts(text_model: TextModel) -> None:
    ids = text_model.encode("ab", add_special=False)
    for stop_id, fields in ((IM_END_ID, {}), (ids[-1], {"stop_token_ids": frozenset({ids[-1]})})):
        acceptor = Acceptor(make_request(sampling=params(9, **fields), want_text=True), text_model)
        deltas = feed(acceptor, [*ids[:1], stop_id], 1)
        assert "".join(d.text for d in deltas) == "a"
        assert (len(acceptor.log), acceptor.finish_reason) == (2, "stop")


def test_a_stop_string_wins_over_the_length_limit(text_model: TextModel) -> None:
    ids = text_model.encode("xyz", add_special=False)
    acceptor = Acceptor(make_request(sampling=params(len(ids)), stop_strings=("z",), want_text=True), text_model)
    deltas = feed(acceptor, ids, 1)
    assert "".join(d.text for d in deltas) == "xy"
    assert acceptor.finish_reason == "stop"


def test_held_back_text_comes_with_the_end(text_model: TextModel) -> None:
    ids = text_model.encode("say STO", add_special=False)
    acceptor = Acceptor(make_request(sampling=params(len(ids)), stop_strings=("STOP",), want_text=True), text_model)
    deltas = feed(acceptor, ids, 2)
    assert "".join(d.text for d in deltas) == "say STO"
    assert deltas[-1].text.endswith("STO")
    assert [d.text_offset for d in deltas] == [len("".join(d.text for d in deltas[:n])) for n in range(len(deltas))]


def test_a_phase_token_at_the_boundary_shows_once(text_model: TextModel) -> None:
    """Case 44: a mode-switch token right at the handoff, proposed again by main, appears once."""
    ids = [*text_model.encode("ab", add_special=False), THINK_ID, *text_model.encode("c", add_special=False)]
    for k in range(len(ids) + 1):
        acceptor = Acceptor(make_request(sampling=params(len(ids)), want_text=True), text_model)
        assert "".join(d.text for d in feed(acceptor, ids, k)) == "ab<think>c"
        assert len(acceptor.log) == len(ids)


def test_contradictions_change_nothing() -> None:
    acceptor = Acceptor(make_request(), None)
    acceptor.accept(0, TokenRecord(11), "relay")
    for position, token_id in ((0, 12), (2, 11)):
        with pytest.raises(TokenLogError):
            acceptor.accept(position, TokenRecord(token_id), "main")
    assert list(acceptor.log.ids) == [11]


def test_text_without_a_text_model_is_refused() -> None:
    with pytest.raises(ValueError, match="text is wanted"):
        Acceptor(make_request(want_text=True), None)
