"""Load against a real endpoint on a socket: what is sent when, what the figures say of it, and that failures are told."""

from __future__ import annotations

import asyncio
import json
from itertools import pairwise
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pdd.bench.serve.client import Record, Target, speaks_pdd
from pdd.bench.serve.figures import Asked, figures, parse_goodput
from pdd.bench.serve.load import LoadPlan, Run, run_load
from pdd.bench.serve.report import spans
from pdd.bench.serve.sessions import Session, Turn
from pdd.cli import app
from tests.support.openai_stub import OpenAIStub


def _target(stub: OpenAIStub) -> Target:
    return Target(stub.url, "/v1/completions", "openai", "stub", stub.tells_ids)


def _load(stub: OpenAIStub, sessions: list[Session], plan: LoadPlan = LoadPlan()) -> Run:  # noqa: B008
    return asyncio.run(run_load(_target(stub), sessions, plan, lambda record: None))


def test_a_turn_that_continues_brings_the_prompt_and_the_answer_before_it() -> None:
    turns = (Turn((1, 2), 3), Turn((7,), 2, continues=True), Turn((8,), 1, continues=True))
    with OpenAIStub() as stub:
        run = _load(stub, [Session("s", turns, 0.0)])
        assert [body["prompt"] for body in stub.bodies] == [[1, 2], [1, 2, 1000, 1001, 1002, 7], [1, 2, 1000, 1001, 1002, 7, 1000, 1001, 8]]
    assert [record.output_tokens for record in run.records] == [3, 2, 1]
    assert run.invented_answers == 0


def test_where_no_ids_are_told_answers_are_invented_and_counted() -> None:
    with OpenAIStub(tells_ids=False) as stub:
        run = _load(stub, [Session("s", (Turn((1, 2), 2, answer_ids=(50, 51, 52)), Turn((7,), 1, continues=True)), 0.0)])
        assert stub.bodies[1]["prompt"] == [1, 2, 50, 51, 7]
        assert "pdd" not in stub.bodies[0]
        assert not asyncio.run(speaks_pdd(stub.url, {}))
    assert run.invented_answers == 1


def test_no_more_at_a_time_than_allowed() -> None:
    sessions = [Session(str(index), (Turn((1,), 5),), 0.0) for index in range(12)]
    with OpenAIStub() as stub:
        assert _load(stub, sessions, LoadPlan(max_concurrency=3)).max_concurrent == 3
        assert stub.most_at_once == 3
    with OpenAIStub(gap_s=0.05) as stub:
        assert _load(stub, sessions).max_concurrent == 12
        assert stub.most_at_once == 12


@pytest.mark.parametrize(("fault", "message"), [("refuse", "HTTP 429: too many requests"), ("break", "without a finish reason")])
def test_a_request_that_fails_is_told_and_ends_its_session(fault: str, message: str) -> None:
    with OpenAIStub(fails={0: fault}) as stub:
        run = _load(stub, [Session("a", (Turn((1,), 2), Turn((2,), 2)), 0.0), Session("b", (Turn((3,), 2),), 0.05)])
        assert len(stub.bodies) == 2
    assert [message in record.error for record in run.records] == [True, False]
    found = figures(run, Asked())
    assert (found["completed"], found["failed"], found["total_output_tokens"]) == (1, 1, 2)


def _record(start_s: float, pieces: list[tuple[float, int]], **timeline: float) -> Record:
    e2e_s = pieces[-1][0]
    return Record("s", 0, start_s, 10, pieces, sum(n for _, n in pieces), finish_reason="length", e2e_s=e2e_s, timeline=dict(timeline))


def test_figures_are_those_of_the_definitions() -> None:
    records = [_record(0.0, [(0.1, 1), (0.2, 1), (0.5, 1)]), _record(1.5, [(0.3, 1), (0.4, 1), (0.5, 1)])]
    found = figures(Run(records, 4.0, 0.0, 0, 2), Asked(("ttft", "e2el"), (50.0, 99.0), parse_goodput(["ttft:200", "tpot:250"])))
    assert found["mean_ttft_ms"] == pytest.approx(200)
    assert found["p50_ttft_ms"] == pytest.approx(200)
    assert found["median_tpot_ms"] == pytest.approx(150)
    assert found["mean_itl_ms"] == pytest.approx(150)
    assert "p99_itl_ms" not in found
    assert found["request_goodput"] == pytest.approx(1 / 4)
    assert found["output_throughput"] == pytest.approx(6 / 4)
    assert found["max_output_tokens_per_s"] == 3
    with pytest.raises(ValueError, match="goodput: given 'itl:3'"):
        parse_goodput(["itl:3"])


def test_the_picture_shows_the_phases_in_order() -> None:
    direct = spans(_record(2.0, [(1.0, 1), (3.0, 1)], prefill_done_s=0.5, main_kv_s=0.9, relay_tokens=0))
    assert [(span.phase, span.start_s, span.end_s) for span in direct] == [
        ("prefill", 2.0, 2.5),
        ("KV on the link", 2.5, 2.9),
        ("main", 3.0, 5.0),
    ]
    relayed = spans(
        _record(0.0, [(1.0, 1), (6.0, 1)], prefill_done_s=0.8, main_kv_s=3.0, relay_tokens=5, handoff_start_s=3.0, handoff_done_s=3.5)
    )
    assert [span.phase for span in relayed] == ["prefill", "KV on the link", "relay", "handoff", "main"]
    assert all(a.end_s <= b.start_s for a, b in pairwise(relayed[2:]))


def test_the_command_writes_the_keys_of_vllm_bench_serve(tmp_path: Path) -> None:
    file, report = tmp_path / "r.json", tmp_path / "r.html"
    with OpenAIStub() as stub:
        options = ["--base-url", stub.url, "--model", "stub", "--vocab-size", "300", "--num-prompts", "6", "--random-input-len", "9"]
        more = ["--random-output-len", "4", "--request-rate", "100", "--num-warmups", "2", "--save-detailed", "--json", str(file)]
        result = CliRunner().invoke(app, ["bench", "serve", *options, *more, "--report", str(report)])
        assert result.exit_code == 0, result.output
        assert len(stub.bodies) == 8
        salts = {str(body["cache_salt"]) for body in stub.bodies}
    assert len(salts) == 2  # the warm-up's prefixes are not the run's
    found = json.loads(file.read_text())
    assert (found["completed"], found["num_prompts"], found["total_output_tokens"], found["total_input_tokens"]) == (6, 6, 24, 54)
    for metric in ("ttft", "tpot", "itl"):
        assert {f"mean_{metric}_ms", f"median_{metric}_ms", f"std_{metric}_ms", f"p99_{metric}_ms"} <= found.keys()
    assert len(found["ttfts"]) == len(found["itls"]) == len(found["errors"]) == 6
    assert "data:image/png;base64," in report.read_text()


@pytest.mark.parametrize(
    ("environment", "options", "sent"),
    [
        ({}, [], None),
        ({"OPENAI_API_KEY": "pdd-1", "PDD_API_KEY": "pdd-3"}, [], "Bearer pdd-1"),
        ({"PDD_API_KEY": "pdd-3"}, [], "Bearer pdd-3"),
        ({"OPENAI_API_KEY": "pdd-1"}, ["--api-key", "pdd-2"], "Bearer pdd-2"),
        ({"OPENAI_API_KEY": "pdd-1"}, ["--header", "authorization=Basic x"], "Basic x"),
    ],
)
def test_a_key_goes_with_every_request(environment: dict[str, str], options: list[str], sent: str | None) -> None:
    with OpenAIStub() as stub:
        always = [
            "--base-url",
            stub.url,
            "--vocab-size",
            "300",
            "--num-prompts",
            "2",
            "--random-input-len",
            "4",
            "--random-output-len",
            "1",
        ]
        result = CliRunner(env={"OPENAI_API_KEY": None, "PDD_API_KEY": None}).invoke(
            app, ["bench", "serve", *always, *options], env=environment
        )
        assert result.exit_code == 0, result.output
        assert set(stub.authorizations) == {sent}
        assert len(stub.authorizations) >= 3  # the question for models, too


def test_an_endpoint_that_is_not_there_is_one_line_and_a_status() -> None:
    result = CliRunner().invoke(app, ["bench", "serve", "--base-url", "http://127.0.0.1:9", "--vocab-size", "300"])
    assert result.exit_code == 1
