"""Datasets: lengths, shared prefixes and arrivals are those that were asked for; a trace keeps the prefixes it recorded."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdd.bench.serve.sessions import Session, arrivals, scaled_time, with_arrivals
from pdd.bench.serve.synthetic import Agents, Random, SharedPrefix, agent_sessions, random_sessions, shared_prefix_sessions
from pdd.bench.serve.trace import Scale, Taken, read_trace


def test_random_prompts_share_the_prefix_alone() -> None:
    prompts = [s.turns[0].prompt_ids for s in random_sessions(Random(20, 30, 8, range_ratio=0.5, prefix_len=7), 300, 1)]
    assert len({prompt[:7] for prompt in prompts}) == 1
    assert len({prompt[7:12] for prompt in prompts}) == 20
    assert all(7 + 15 <= len(prompt) <= 7 + 45 for prompt in prompts)
    assert len({len(prompt) for prompt in prompts}) > 5


def test_every_prefix_is_used_alike() -> None:
    prompts = [s.turns[0].prompt_ids for s in shared_prefix_sessions(SharedPrefix(12, 3, 5, 4, 2), 300, 1)]
    counts = [sum(other[:5] == prompt[:5] for other in prompts) for prompt in prompts]
    assert counts == [4] * 12


def test_agents_grow_their_context_until_it_is_full() -> None:
    params = Agents(5, turns=40, scale=0.02, max_context_tokens=900)
    sessions = agent_sessions(params, 300, 3)
    assert sessions == agent_sessions(params, 300, 3)
    for session in sessions:
        total = sum(len(turn.prompt_ids) + turn.output_tokens for turn in session.turns)
        assert total <= 900
        assert [turn.continues for turn in session.turns] == [False] + [True] * (len(session.turns) - 1)
    assert len({session.turns[0].prompt_ids[:200] for session in sessions}) == 1  # one system prompt for all
    with pytest.raises(ValueError, match="no room for an answer"):
        agent_sessions(Agents(1, max_context_tokens=100), 300, 0)


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 200), st.floats(0.1, 100), st.floats(0.2, 20), st.integers(0, 99))
def test_arrivals_offer_the_rate_they_say(num: int, rate: float, burstiness: float, seed: int) -> None:
    times = arrivals(num, rate, burstiness, seed)
    assert times == sorted(times)
    assert times[-1] == pytest.approx(num / rate)
    assert arrivals(num, None, burstiness, seed) == [0.0] * num


def test_time_is_scaled_everywhere() -> None:
    trace = agent_sessions(Agents(2, turns=3, scale=0.01), 300, 0)
    slow = with_arrivals(trace, [1.0, 2.0])
    fast = scaled_time(slow, 0.1)
    assert [session.start_s for session in fast] == [pytest.approx(0.1), pytest.approx(0.2)]
    assert fast[0].turns[1].wait_s == pytest.approx(slow[0].turns[1].wait_s * 0.1)


def _write(path: Path, rows: list[dict[str, object]]) -> Path:
    path.write_bytes(gzip.compress("\n".join(json.dumps(row) for row in rows).encode()))
    return path


def test_a_chat_trace_keeps_arrivals_lengths_and_shared_blocks(tmp_path: Path) -> None:
    rows: list[dict[str, object]] = [
        {"timestamp": 0, "input_length": 1000, "output_length": 64, "hash_ids": [0, 1]},
        {"timestamp": 1500, "input_length": 1500, "output_length": 32, "hash_ids": [0, 1, 2]},
        {"timestamp": 1600, "input_length": 1100, "output_length": 8, "hash_ids": [0, 9, 4]},
        {"timestamp": 1700, "input_length": 99_000, "output_length": 8, "hash_ids": list(range(100, 294))},
    ]
    read = read_trace(_write(tmp_path / "t.jsonl.gz", rows), Scale(1 / 16, 1 / 16), 500, 300, Taken(), 5)
    assert read.left_out == 1
    prompts = [session.turns[0].prompt_ids for session in read.sessions]
    assert [session.start_s for session in read.sessions] == [0.0, 1.5, 1.6]
    assert [len(prompt) for prompt in prompts] == [62, 94, 69]
    assert _shared(prompts[0], prompts[1]) == 62
    assert _shared(prompts[0], prompts[2]) == 32  # one block of 512 / 16


def test_an_agents_trace_is_chains_per_sub_agent(tmp_path: Path) -> None:
    def row(session: str, sub: str, length: int, runs: list[list[int]], think: float) -> dict[str, object]:
        return {"s": session, "sub": sub, "t": 0.0, "input_length": length, "output_length": 40, "think_time": think, "hash_runs": runs}

    rows = [
        row("a", "", 640, [[1, 10]], 0.0),
        row("a", "", 1280, [[1, 10], [40, 10]], 3.0),
        row("a", "x", 640, [[1, 5], [70, 5]], 0.0),
        row("b", "", 640, [[1, 10]], 0.0),
    ]
    read = read_trace(_write(tmp_path / "t.jsonl.gz", rows), Scale(0.25, 0.5), 1000, 300, Taken(), 5)
    chains = {session.name: session for session in read.sessions}
    assert list(chains) == ["a", "a/x", "b"]
    first, second = (turn.prompt_ids for turn in chains["a"].turns)
    assert (len(first), len(second), chains["a"].turns[1].wait_s) == (160, 320, 3.0)
    assert _shared(first, second) == 160
    assert _shared(first, chains["a/x"].turns[0].prompt_ids) == 80
    assert _shared(first, chains["b"].turns[0].prompt_ids) < 10  # ids are local to a session
    assert all(session.start_s is None for session in chains.values())
    assert {turn.output_tokens for session in chains.values() for turn in session.turns} == {20}

    def lengths(taken: Taken) -> list[int]:
        return [len(session.turns) for session in read_trace(tmp_path / "t.jsonl.gz", Scale(0.25, 0.5), 1000, 300, taken, 5).sessions]

    assert lengths(Taken(requests=3)) == [2, 1]
    assert lengths(Taken(requests=1, sessions=2)) == [2, 1]  # sessions count, not requests
    assert lengths(Taken(sessions=3, turns=1)) == [1, 1, 1]
    with pytest.raises(ValueError, match="length scale"):
        Scale(1, 0)


@pytest.mark.parametrize("content", ["", "{", '{"timestamp": 1}', "[]"])
def test_what_is_no_trace_is_refused_in_one_line(tmp_path: Path, content: str) -> None:
    file = tmp_path / "t.jsonl"
    file.write_text(content)
    with pytest.raises(ValueError, match=r"t\.jsonl"):
        read_trace(file, Scale(1, 1), 100, 300, Taken(), 0)


def _shared(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    return next((index for index, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def test_sessions_with_a_start_of_their_own_keep_it() -> None:
    mixed = [Session("a", (), 5.0), Session("b", ())]
    assert [session.start_s for session in with_arrivals(mixed, [1.0])] == [5.0, 1.0]
