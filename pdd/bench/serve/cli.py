"""The options of `pdd bench serve`. Names and defaults are those of `vllm bench serve` where it has them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from pdd.bench.serve import command, sessions, synthetic
from pdd.bench.serve.client import Target, speaks_pdd
from pdd.bench.serve.figures import METRICS, Asked, parse_goodput
from pdd.bench.serve.load import LoadPlan
from pdd.bench.serve.trace import Scale, Taken, read_trace
from pdd.cli_common import above_zero, cache_dir, fail, reportable, wide_console, writable

Dataset = Literal["random", "prefix_repetition", "agents", "trace"]


def serve(
    base_url: Annotated[str | None, typer.Option("--base-url", help="of the endpoint; default: http://HOST:PORT")] = None,
    host: Annotated[str, typer.Option(help="of the endpoint")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="of the endpoint")] = 8000,
    backend: Annotated[
        Literal["openai", "openai-chat"], typer.Option(help="completions, prompts of ids; or chat, prompts of text")
    ] = "openai",
    endpoint: Annotated[str | None, typer.Option(help="path; default: the backend's")] = None,
    header: Annotated[list[str] | None, typer.Option(help="KEY=VALUE, sent with every request")] = None,
    api_key: Annotated[str | None, typer.Option(envvar=["OPENAI_API_KEY", "PDD_API_KEY"], help="sent as a bearer token")] = None,
    model: Annotated[str, typer.Option(help="as the endpoint calls it")] = "smollm2-135m",
    tokenizer: Annotated[
        str | None, typer.Option(help="pulled model or directory whose vocabulary prompts are of; default: --model")
    ] = None,
    vocab_size: Annotated[int | None, typer.Option(min=1, help="instead of a tokenizer, for prompts of ids")] = None,
    launch: Annotated[
        Path | None, typer.Option("--launch", help="launch this config and measure its modes, instead of an endpoint")
    ] = None,
    modes: Annotated[str, typer.Option(help="of --launch: some of same_site,cross_site,pdd")] = "same_site,cross_site,pdd",
    dataset_name: Annotated[Dataset, typer.Option("--dataset-name", help="what is sent")] = "random",
    num_prompts: Annotated[
        int, typer.Option("--num-prompts", min=1, help="requests; of a trace: from its beginning; of agents: sessions")
    ] = 100,
    random_input_len: Annotated[int, typer.Option(min=1, help="random: prompt tokens")] = 1024,
    random_output_len: Annotated[int, typer.Option(min=1, help="random: output tokens")] = 128,
    random_range_ratio: Annotated[float, typer.Option(help="random: lengths vary by this share")] = 0.0,
    random_prefix_len: Annotated[int, typer.Option(help="random: tokens before, the same for all")] = 0,
    prefix_repetition_prefix_len: Annotated[int, typer.Option(help="prefix_repetition: tokens")] = 256,
    prefix_repetition_suffix_len: Annotated[int, typer.Option(help="prefix_repetition: tokens")] = 256,
    prefix_repetition_num_prefixes: Annotated[int, typer.Option(help="prefix_repetition: how many")] = 10,
    prefix_repetition_output_len: Annotated[int, typer.Option(help="prefix_repetition: tokens")] = 128,
    turns: Annotated[
        int | None, typer.Option(min=1, help="agents, trace: of a session at most [default: agents 12, of a trace all]")
    ] = None,
    num_sessions: Annotated[
        int | None, typer.Option("--num-sessions", min=1, help="trace of sessions: that many from its beginning, instead of --num-prompts")
    ] = None,
    trace: Annotated[Path | None, typer.Option(help="trace: the file (JSON lines, .gz or not)")] = None,
    length_scale: Annotated[float, typer.Option(callback=above_zero, help="agents, trace: all lengths times this")] = 1.0,
    output_length_scale: Annotated[
        float | None, typer.Option(callback=above_zero, help="trace: those of answers times this, instead")
    ] = None,
    time_scale: Annotated[float, typer.Option(callback=above_zero, help="agents, trace: all recorded times times this")] = 1.0,
    max_context: Annotated[int, typer.Option(help="agents, trace: tokens; what does not fit is left out and counted")] = 4096,
    request_rate: Annotated[float, typer.Option(help="arrivals per second (of sessions, where they have turns); inf: all at once")] = float(
        "inf"
    ),
    burstiness: Annotated[
        float, typer.Option(callback=above_zero, help="of arrivals: 1 is Poisson, below burstier, above more even")
    ] = 1.0,
    max_concurrency: Annotated[int | None, typer.Option(min=1, help="requests at a time")] = None,
    goodput: Annotated[list[str] | None, typer.Option(help="METRIC:MILLISECONDS, of ttft, tpot, e2el; what a good request keeps")] = None,
    percentile_metrics: Annotated[str, typer.Option(help=f"some of {','.join(METRICS)}")] = "ttft,tpot,itl",
    metric_percentiles: Annotated[str, typer.Option(help="separated by commas")] = "99",
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos/--no-ignore-eos", help="answers have the length that was asked for")] = True,
    temperature: Annotated[float, typer.Option(min=0, help="0: greedy")] = 0.0,
    extra_body: Annotated[str | None, typer.Option(help="JSON object, over what is sent")] = None,
    num_warmups: Annotated[int, typer.Option(min=0, help="requests before, not measured")] = 1,
    seed: Annotated[int, typer.Option(help="of prompts and arrivals")] = 0,
    label: Annotated[str | None, typer.Option(help="in the JSON")] = None,
    save_detailed: Annotated[bool, typer.Option("--save-detailed", help="a list per request in the JSON, too")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", "--result-filename", callback=writable, help="write the figures here")] = None,
    report: Annotated[Path | None, typer.Option(callback=reportable, help="timelines of all requests (HTML or PNG)")] = None,
) -> None:
    """Load against an OpenAI-compatible endpoint, or against the three modes of a launch config in one run. Exit status 1 when a request
    failed."""
    from pdd.launch.ask import AskError
    from pdd.launch.local import StartError
    from pdd.launch.serve import end_on_signal

    console = wide_console()
    end_on_signal()
    rate = None if request_rate == float("inf") else request_rate
    rule: str | None = None
    try:
        size, token_text = _vocabulary(tokenizer or model, vocab_size, backend == "openai-chat")
        if dataset_name == "random":
            asked = synthetic.Random(num_prompts, random_input_len, random_output_len, random_range_ratio, random_prefix_len)
            sent = synthetic.random_sessions(asked, size, seed)
        elif dataset_name == "prefix_repetition":
            repeated = synthetic.SharedPrefix(
                num_prompts,
                prefix_repetition_num_prefixes,
                prefix_repetition_prefix_len,
                prefix_repetition_suffix_len,
                prefix_repetition_output_len,
            )
            sent = synthetic.shared_prefix_sessions(repeated, size, seed)
        elif dataset_name == "agents":
            agents = synthetic.Agents(
                num_prompts, synthetic.Agents.turns if turns is None else turns, length_scale, max_context_tokens=max_context
            )
            sent = synthetic.agent_sessions(agents, size, seed)
        elif trace is None:
            raise ValueError("--trace: the dataset trace needs a file")
        else:
            scale = Scale(length_scale, length_scale if output_length_scale is None else output_length_scale)
            read = read_trace(trace, scale, max_context, size, Taken(num_prompts, num_sessions, turns), seed)
            rule = f"{scale}, times x {time_scale:g}; {read.left_out} left out that do not fit {max_context}"
            console.print(f"{sessions.num_requests(read.sessions)} requests of {len(read.sessions)} sessions; {rule}")
            sent = read.sessions
        sent = sessions.scaled_time(sent, time_scale)
        free = sum(session.start_s is None for session in sent)
        sent = sessions.with_arrivals(sent, sessions.arrivals(free, rate, burstiness, seed) if free else [])
        if not sent:
            raise ValueError("there is nothing to send")
        wanted = Asked(_metrics(percentile_metrics), _percentiles(metric_percentiles), parse_goodput(goodput or []))
        told = command.Told(backend, model, tokenizer, dataset_name, rate, burstiness, max_concurrency, seed, label, rule)
        plan = LoadPlan(max_concurrency, ignore_eos, temperature, token_text=token_text)
        headers = _headers(header or [], api_key)
        with ExitStack() as stack:
            path = endpoint or ("/v1/completions" if backend == "openai" else "/v1/chat/completions")
            more = _extra(extra_body)

            def target(url: str, ours: bool) -> Target:
                return Target(url, path, backend, model, ours, headers, more)

            if launch is None:
                url = base_url or f"http://{host}:{port}"
                subjects = [command.Subject("endpoint", target(url, _asked_models(url, headers)))]
            else:
                subjects = [command.Subject(mode, target(url, True)) for mode, url in _launch(launch, modes, stack, console)]
            measured = command.measure(subjects, sent, plan, wanted, num_warmups, console, f"{seed}")
    except (ValueError, OSError, StartError, AskError) as error:
        raise fail(error) from error
    command.show(measured, console)
    if json_file is not None:
        command.save({one.label: command.result(one, told, save_detailed) for one in measured}, json_file)
    if report is not None:
        from pdd.bench.serve.report import save_report

        save_report(measured, told, report)
    if any(record.error for one in measured for record in one.run.records):
        raise typer.Exit(1)


def _vocabulary(name: str, size: int | None, needs_text: bool) -> tuple[int, Callable[[Sequence[int]], str] | None]:
    from pdd.models import resolve
    from pdd.serving.text.model import TextModel

    if size is not None and not needs_text:
        return size, None
    try:
        text_model = TextModel.load(resolve(name, cache_dir()))
    except ValueError as error:
        raise ValueError(f"--tokenizer: {error}; or say --vocab-size") from error
    return text_model.vocab_size, lambda ids: b"".join(text_model.token_bytes(token) for token in ids).decode("utf-8", "replace")


def _launch(path: Path, modes: str, stack: ExitStack, console: Console) -> list[tuple[str, str]]:
    """(mode, base URL) of each; the deployment ends with ``stack``."""
    from pdd.bench.modes import MODES, own_ports, start_modes
    from pdd.config import load
    from pdd.launch.local import Deployment
    from pdd.launch.serve import StartProgress

    wanted = modes.split(",")
    if not set(wanted) <= set(MODES):
        raise ValueError(f"--modes: given {modes!r}, allowed some of {','.join(MODES)}")
    deployment = stack.enter_context(Deployment(own_ports(load(path)), cache_dir()))
    urls = start_modes(deployment, StartProgress(console))
    return [(mode, urls[mode].removesuffix("/v1/completions")) for mode in MODES if mode in wanted]


def _asked_models(url: str, headers: dict[str, str]) -> bool:
    import asyncio

    return asyncio.run(speaks_pdd(url, headers))


def _headers(pairs: Sequence[str], api_key: str | None) -> dict[str, str]:
    """A header that is given wins over the key's. Raises ValueError."""
    for pair in pairs:
        if "=" not in pair:
            raise ValueError(f"--header: given {pair!r}, allowed KEY=VALUE")
    headers = dict(pair.split("=", 1) for pair in pairs)
    if api_key and not any(name.lower() == "authorization" for name in headers):
        headers["Authorization"] = f"Bearer {api_key}"
    return headers


def _metrics(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if not set(names) <= set(METRICS):
        raise ValueError(f"--percentile-metrics: given {text!r}, allowed some of {','.join(METRICS)}")
    return names


def _percentiles(text: str) -> tuple[float, ...]:
    try:
        values = tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise ValueError(f"--metric-percentiles: given {text!r}, allowed numbers separated by commas") from error
    if not all(0 <= value <= 100 for value in values):
        raise ValueError(f"--metric-percentiles: given {text!r}, allowed 0 to 100")
    return values


def _extra(text: str | None) -> dict[str, object]:
    if text is None:
        return {}
    try:
        extra = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"--extra-body: not JSON: {error}") from error
    if not isinstance(extra, dict):
        raise ValueError(f"--extra-body: given {text!r}, allowed a JSON object")
    return extra
