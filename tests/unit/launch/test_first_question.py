"""What `pdd serve` asks once it is ready, and that a service goes on when that is not answered."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from pdd.cli import app
from pdd.config import load
from pdd.launch.serve import Question, ask_first
from tests.support.openai_stub import OpenAIStub

CONFIG = Path(__file__).parents[3] / "configs" / "local.yaml"


@pytest.mark.parametrize(("chat", "field"), [(True, "messages"), (False, "prompt")])
def test_a_model_without_a_template_is_given_plain_text(chat: bool, field: str) -> None:
    with OpenAIStub() as stub:
        answer = ask_first(load(CONFIG), stub.url, Console(quiet=True), Question("why?", 3, chat))
    assert answer is not None
    assert answer.text == "xxx"
    assert {"messages", "prompt"} & set(stub.bodies[0]) == {field}


def test_a_question_that_is_refused_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with OpenAIStub(fails={0: "refuse"}) as stub:
        assert ask_first(load(CONFIG), stub.url, Console(quiet=True), Question("why?", 3, True)) is None
    assert capsys.readouterr().err == "pdd: the question was not answered: too many requests\n"


@pytest.mark.parametrize(("options", "named"), [(["--max-tokens", "0"], "--max-tokens"), (["--ask", ""], "--ask")])
def test_a_question_that_cannot_be_asked_is_refused_before_anything_starts(
    options: list[str], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pdd.launch.local.Deployment", lambda *arguments: pytest.fail("started"))
    refused = CliRunner().invoke(app, ["serve", str(CONFIG), "--once", *options])
    assert refused.exit_code in (1, 2)
    assert named in refused.output
