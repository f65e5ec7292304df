"""`pdd serve`: bring a deployment up with progress on the screen, ask it one question, keep serving until Ctrl-C."""

from __future__ import annotations

import json
import signal
import sys
from dataclasses import dataclass
from importlib import resources
from types import FrameType

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

from pdd.cli_common import fail
from pdd.config import LaunchConfig
from pdd.launch.ask import Access, Answer, AskError, Piece, ask
from pdd.launch.local import Deployment
from pdd.launch.process import ChildEvent

_COLOURS = {"relay": "yellow", "main": "cyan"}


def end_on_signal() -> None:
    """SIGTERM ends us the same way as Ctrl-C: through the context managers, so that every child is ended."""

    def handler(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, handler)


class StartProgress:
    """One bar per process on a terminal, one line per event elsewhere."""

    def __init__(self, console: Console) -> None:
        columns = (
            SpinnerColumn(),
            TextColumn("{task.description:<14}"),
            BarColumn(20),
            TextColumn("{task.fields[state]}"),
            TimeElapsedColumn(),
        )
        self.bars = Progress(*columns, console=console, disable=not console.is_terminal)
        self._console = console
        self._tasks: dict[str, TaskID] = {}

    def __call__(self, event: ChildEvent) -> None:
        if not self._console.is_terminal and event.event != "warm_up":
            self._console.print(f"{event.name}: {event.event}", soft_wrap=True)  # a log wants lines, not bars
        if event.name not in self._tasks:
            self._tasks[event.name] = self.bars.add_task(event.name, total=None, state="starting")
        task = self._tasks[event.name]
        if event.event == "warm_up":
            done, total = float(event.fields["done"]), float(event.fields["total"])
            self.bars.update(task, completed=done, total=total, state=f"warm-up {done:.0f}/{total:.0f}")
        elif event.event == "ready":
            self.bars.update(task, completed=1, total=1, state="ready")
            self.bars.stop_task(task)
        else:
            self.bars.update(task, state=event.event)


def start(deployment: Deployment, console: Console) -> float:
    """Start and show it; returns seconds until ready."""
    progress = StartProgress(console)
    with progress.bars:
        for name in [worker.name for worker in deployment.config.workers]:
            progress(ChildEvent(name, "starting", {}))
        ready_s = deployment.start(progress)
    console.print(f"ready after {ready_s:.1f} s")
    return ready_s


def demo_question() -> str:
    """A question about an article of some 750 tokens: long enough for the wide-area link to matter."""
    return (resources.files("pdd.launch") / "demo_prompt.txt").read_text(encoding="utf-8").strip()


@dataclass(frozen=True)
class Question:
    """``chat``: through the model's chat template; else as plain text, which is all that a model without one can be given."""

    text: str
    max_tokens: int
    chat: bool


def ask_and_show(config: LaunchConfig, url: str, console: Console, question: Question, key: str | None = None) -> Answer:
    """Ask the OpenAI door at ``url`` and print the answer as it comes, coloured by who made each token, then one line on what happened.
    Raises AskError when there is no answer.
    """
    console.print(Text.assemble("\nanswer (", ("relay", _COLOURS["relay"]), ", ", ("main", _COLOURS["main"]), "):"))

    def show(piece: Piece) -> None:
        console.print(Text(piece.text, style=_COLOURS.get(piece.origin, "")), end="", soft_wrap=True)

    body: dict[str, object] = {
        "model": config.model,
        "max_tokens": question.max_tokens,
        "temperature": 0,
        "frequency_penalty": 0.3,  # so small a model repeats itself otherwise
    }
    asked: dict[str, object] = {"messages": [{"role": "user", "content": question.text}]} if question.chat else {"prompt": question.text}
    path = "chat/completions" if question.chat else "completions"
    answer = ask(f"{url}/v1/{path}", body | asked, show, access=Access(config.security.ca, key))
    console.print()
    console.print(timeline_line(answer), style="dim", soft_wrap=True)
    return answer


def ask_first(config: LaunchConfig, url: str, console: Console, question: Question, key: str | None = None) -> Answer | None:
    """As ``ask_and_show``, for a service that goes on without an answer: None then, and one line on stderr."""
    try:
        return ask_and_show(config, url, console, question, key)
    except AskError as error:
        fail(f"the question was not answered: {error}")
        return None


def timeline_line(answer: Answer) -> str:
    """Prefill, KV arrival, handoff, TTFT, largest gap: one line."""
    t = answer.timeline

    def at(name: str) -> str:
        value = t.get(name)
        return f"{value:.2f} s" if isinstance(value, int | float) else "-"

    return " · ".join(
        (
            f"{t.get('pipeline')} ({t.get('pipeline_reason')})",
            f"prefill done {at('prefill_done_s')}",
            f"first token {at('ttft_s')}",
            f"KV at relay {at('relay_kv_s')}, at main {at('main_kv_s')}",
            f"{t.get('wan_kv_bytes')} B of KV to main ({t.get('wan_kv_wire_bytes')} on the wire)",
            f"handoff {at('handoff_start_s')} to {at('handoff_done_s')} ({t.get('handoff') or 'none'})",
            f"{answer.tokens_by('relay')} relay + {answer.tokens_by('main')} main tokens",
            f"largest gap {at('max_itl_s')}",
        )
    )


def summary(answer: Answer, ready_s: float) -> str:
    """The last line of `pdd serve --once`: one JSON object."""
    t = answer.timeline
    return json.dumps(
        {
            "answer": answer.text,
            "finish_reason": answer.finish_reason,
            "tokens_relay": answer.tokens_by("relay"),
            "tokens_main": answer.tokens_by("main"),
            "wan_kv_bytes": t.get("wan_kv_bytes"),
            "wan_kv_wire_bytes": t.get("wan_kv_wire_bytes"),
            "main_prefill_tokens": t.get("main_prefill_tokens"),
            "ttft_s": t.get("ttft_s"),
            "max_itl_s": t.get("max_itl_s"),
            "ready_s": round(ready_s, 3),
            "timeline": t,
        }
    )


def hints(deployment: Deployment, console: Console) -> None:
    """Lines to try: curl, the openai client, grpcurl. Where a key or an authority is needed: curl, with both."""
    url, model, grpc = deployment.http_url, deployment.config.model, deployment.topology.grpc
    curl_body = json.dumps({"model": model, "messages": [{"role": "user", "content": "Hi!"}], "stream": True})
    python = (
        f"import openai; c = openai.OpenAI(base_url='{url}/v1', api_key='none'); "
        f"print(c.chat.completions.create(model='{model}', messages=[{{'role': 'user', 'content': 'Hi!'}}]).choices[0].message.content)"
    )
    console.print("\nserving; try:", style="bold")
    security = deployment.config.security
    if security.door_files is not None or security.api_keys is not None:
        extra = "" if security.door_files is None else f" --cacert {security.ca or 'CA.pem'}"
        extra += "" if security.api_keys is None else ' -H "Authorization: Bearer $PDD_API_KEY"'
        line = f"curl -N{extra} {url}/v1/chat/completions -H 'Content-Type: application/json' -d '{curl_body}'"
        console.print(Text("  " + line), soft_wrap=True)
        console.print("Ctrl-C ends every process.\n", style="dim")
        return
    for line in (
        f"curl -N {url}/v1/chat/completions -H 'Content-Type: application/json' -d '{curl_body}'",
        f'{sys.executable} -c "{python}"',
        f'grpcurl -plaintext -d \'{{"text": "Once upon a time", "max_tokens": 32}}\' {grpc} pdd.v1.Inference/Generate',
    ):
        console.print(Text("  " + line), soft_wrap=True)
    console.print("Ctrl-C ends every process.\n", style="dim")
