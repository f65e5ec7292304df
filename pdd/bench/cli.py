"""`pdd bench ...`: the options of every measurement. What they measure is each module's own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from pdd.bench.mix import SkewedMix
from pdd.bench.serve.cli import serve
from pdd.cli_common import DEFAULT_CONFIG, ConfigArgument, above_zero, cache_dir, drawable, fail, wide_console, writable
from pdd.config import load

bench = typer.Typer(no_args_is_help=True, help="Measurements.")
bench.command()(serve)


@bench.command()
def ttft(
    config: ConfigArgument = DEFAULT_CONFIG,
    num_requests: Annotated[int | None, typer.Option("--num-prompts", min=1, help="requests per mode [default: 10, of a mix 60]")] = None,
    input_len: Annotated[int, typer.Option("--random-input-len", min=1, help="prompt tokens")] = 1000,
    output_len: Annotated[int, typer.Option("--random-output-len", min=2, help="output tokens")] = 128,
    rate_mbit_s: Annotated[
        float | None, typer.Option("--link-rate-mbit-s", callback=above_zero, help="of the emulated link; default: the config's")
    ] = None,
    mix: Annotated[
        Literal["one_by_one", "skewed"], typer.Option(help="skewed: primed caches, many at a time, few of them large")
    ] = "one_by_one",
    request_rate: Annotated[
        float, typer.Option("--request-rate", callback=above_zero, help="of a mix: arrivals per second")
    ] = SkewedMix.rate_per_s,
    rounds: Annotated[int, typer.Option(min=1, help="of a mix: times that each mode gets it")] = 1,
    seed: Annotated[int, typer.Option(help="of the prompts")] = 0,
    json_file: Annotated[Path | None, typer.Option("--json", callback=writable, help="write the figures here")] = None,
    plot_file: Annotated[Path | None, typer.Option("--plot", callback=drawable, help="draw the figures here (PNG or SVG)")] = None,
) -> None:
    """Same-site split, cross-site split and PDD in one run on one prompt set: TTFT, gaps, end to end, KV moved."""
    from pdd.bench import ttft, ttft_mix
    from pdd.launch.ask import AskError
    from pdd.launch.local import StartError
    from pdd.launch.serve import end_on_signal
    from pdd.models import resolve

    console = wide_console()
    end_on_signal()
    try:
        launch = load(config) if rate_mbit_s is None else ttft.with_link_rate(load(config), rate_mbit_s)
        resolve(launch.model, cache_dir())
        if mix == "skewed":
            params = SkewedMix(SkewedMix.num_requests if num_requests is None else num_requests, request_rate)
            outcomes = ttft_mix.run(launch, cache_dir(), ttft_mix.Plan(params, rounds, seed), console, json_file)
            ttft_mix.show(outcomes, console)
            if plot_file is not None:
                ttft.save_plot(outcomes, plot_file)
        else:
            plan = ttft.Plan(10 if num_requests is None else num_requests, input_len, output_len, seed)
            results = ttft.run(launch, cache_dir(), plan, console, json_file)
            ttft.show(results, console)
            if plot_file is not None:
                ttft.save_plot(results, plot_file)
    except (ValueError, OSError, StartError, AskError) as error:
        raise fail(error) from error


@bench.command()
def handoff(
    config: ConfigArgument = DEFAULT_CONFIG,
    rounds: Annotated[int, typer.Option(help="handoffs per length and route")] = 15,
    rate_mbit_s: Annotated[float, typer.Option(callback=above_zero, help="of the emulated link")] = 100.0,
    rtt_ms: Annotated[float, typer.Option(help="of the emulated link")] = 20.0,
    jitter_ms: Annotated[float, typer.Option(help="of the emulated link")] = 5.0,
    background_tokens: Annotated[int, typer.Option(min=0, help="mean size of the other transfers on the link; 0: none")] = 300,
    seed: Annotated[int, typer.Option(help="of tokens and background")] = 0,
    json_file: Annotated[Path | None, typer.Option("--json", callback=writable, help="write the rows here")] = None,
    plot_file: Annotated[Path | None, typer.Option("--plot", callback=drawable, help="draw them here (PNG or SVG)")] = None,
) -> None:
    """Relayed tokens handed to main decode as IDs against as KV: payload, time, spread, and what neighbours feel."""
    from pdd.bench.handoff import Plan, run, save_plot, show
    from pdd.config import EmulatedLink
    from pdd.launch.ask import AskError
    from pdd.launch.local import StartError
    from pdd.launch.serve import end_on_signal
    from pdd.models import resolve

    console = Console(highlight=False)
    end_on_signal()
    try:
        link = EmulatedLink(rate_mbit_s=rate_mbit_s, rtt_ms=rtt_ms, jitter_ms=jitter_ms)
        plan = Plan(link, rounds=rounds, background_tokens=background_tokens, seed=seed)
        launch = load(config)
        resolve(launch.model, cache_dir())
        rows = run(launch, cache_dir(), plan, console, json_file)
        show(rows, plan, console)
        if plot_file is not None:
            save_plot(rows, plot_file)
    except (ValueError, OSError, StartError, AskError) as error:
        raise fail(error) from error


@bench.command()
def engine(
    model: Annotated[str, typer.Option(help="a pulled model's name, or a directory")] = "smollm2-135m",
    subjects: Annotated[str, typer.Option("--engines", help="engine:dtype, separated by commas")] = "jax:float32,torch:bfloat16",
    streams: Annotated[str, typer.Option(help="rows of the decode cases, separated by commas")] = "1,4,8,16",
    context: Annotated[int, typer.Option(help="tokens that a decode case's rows have")] = 200,
    long_context: Annotated[int, typer.Option(min=0, help="tokens of one more case of one row; 0: none")] = 2000,
    prompts: Annotated[str, typer.Option(help="lengths of the prefill cases, separated by commas")] = "256,1024,2048",
    steps: Annotated[int, typer.Option(help="decode steps per case and round")] = 32,
    rounds: Annotated[int, typer.Option(help="rounds; figures are medians")] = 5,
    threads: Annotated[int, typer.Option(help="compute threads of each subject")] = 2,
    step_tokens: Annotated[int, typer.Option(help="of a prompt that an engine computes at a time; generate takes all at once")] = 512,
    json_file: Annotated[Path | None, typer.Option("--json", callback=writable, help="write the rows here")] = None,
) -> None:
    """Prefill and decode throughput per engine and dtype, beside Hugging Face's generate and the machine's own limits."""
    from pdd.bench.engine import Plan, run, show
    from pdd.bench.engine_subject import ChildError
    from pdd.launch.serve import end_on_signal
    from pdd.models import resolve

    console = Console(highlight=False)
    end_on_signal()
    try:
        plan = Plan(
            subjects=tuple(_pair(subject) for subject in subjects.split(",")),
            streams=_counts("streams", streams),
            context=context,
            long_context=long_context or None,
            prompts=_counts("prompts", prompts),
            decode_steps=steps,
            rounds=rounds,
            threads=threads,
            step_tokens=step_tokens,
        )
        show(run(resolve(model, cache_dir()), cache_dir(), plan, console, json_file), console)
    except (ValueError, OSError, ChildError) as error:
        raise fail(error) from error


@bench.command()
def hits(
    model: Annotated[str, typer.Option(help="a pulled model's name, or a directory")] = "smollm2-135m",
    subjects: Annotated[str, typer.Option("--engines", help="engine:dtype, separated by commas")] = "jax:float32,torch:bfloat16",
    prompts: Annotated[int, typer.Option(help="prompts that come at once")] = 8,
    shortest: Annotated[int, typer.Option(help="of them, tokens")] = 300,
    longest: Annotated[int, typer.Option(help="of them, tokens")] = 1200,
    step_tokens: Annotated[int, typer.Option(help="new tokens of a step at most")] = 512,
    rounds: Annotated[int, typer.Option(help="rounds; figures are medians")] = 2,
    threads: Annotated[int, typer.Option(help="compute threads")] = 2,
    seed: Annotated[int, typer.Option(help="of lengths and tokens")] = 0,
    json_file: Annotated[Path | None, typer.Option("--json", callback=writable, help="write the rows here")] = None,
    plot_file: Annotated[Path | None, typer.Option("--plot", callback=drawable, help="draw them here (PNG or SVG)")] = None,
) -> None:
    """Prefill throughput over prefix-hit rates from 0 to 95 %. Exit status 1 when a point dips below the line between its neighbours."""
    from pdd.bench.engine_subject import ChildError
    from pdd.bench.hits import Plan, run, save_plot, show
    from pdd.launch.serve import end_on_signal
    from pdd.models import resolve

    console = wide_console()
    end_on_signal()
    try:
        pairs = tuple(_pair(subject) for subject in subjects.split(","))
        plan = Plan(
            pairs,
            prompts=prompts,
            shortest=shortest,
            longest=longest,
            step_tokens=step_tokens,
            rounds=rounds,
            threads=threads,
            seed=seed,
        )
        rows = run(resolve(model, cache_dir()), cache_dir(), plan, console, json_file)
        show(rows, plan, console)
        if plot_file is not None:
            save_plot(rows, plot_file)
    except (ValueError, OSError, ChildError) as error:
        raise fail(error) from error
    if any(row.dips for row in rows):
        raise typer.Exit(1)


@bench.command()
def steady(
    config: ConfigArgument = DEFAULT_CONFIG,
    minutes: Annotated[float, typer.Option(callback=above_zero, help="of traffic")] = 10.0,
    clients: Annotated[int, typer.Option(help="that each ask one thing after another")] = 3,
    pause_s: Annotated[float, typer.Option(callback=above_zero, help="mean pause of a client between requests")] = 0.5,
    seed: Annotated[int, typer.Option(help="of the traffic")] = 0,
    json_file: Annotated[Path | None, typer.Option("--json", callback=writable, help="write the report here")] = None,
) -> None:
    """Whether a deployment under mixed traffic stays as it was: compilations, memory, event loops, ledgers. Exit status 1 when not."""
    from pdd.bench.steady import Plan, run, show
    from pdd.launch.ask import AskError
    from pdd.launch.local import StartError
    from pdd.launch.serve import end_on_signal

    console = wide_console()
    end_on_signal()
    try:
        report = run(load(config), cache_dir(), Plan(minutes, clients, pause_s, seed=seed), console, json_file)
    except (ValueError, OSError, StartError, AskError) as error:
        raise fail(error) from error
    show(report, console)
    if report.faults:
        raise typer.Exit(1)


def _pair(subject: str) -> tuple[str, str]:
    name, _, dtype = subject.strip().partition(":")
    return name, dtype


def _counts(option: str, text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise ValueError(f"{option}: given {text!r}, allowed: numbers separated by commas") from error
