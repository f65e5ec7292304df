"""The `pdd` command: a composition root. Reads argv and environment, wires the parts, turns errors into one clear line and a status."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from pdd.config import load

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Prefill and relay decode here, main decode there.")
bench = typer.Typer(no_args_is_help=True, help="Measurements.")
app.add_typer(bench, name="bench")

_DEFAULT_CONFIG = Path("configs/local.yaml")
ConfigArgument = Annotated[Path, typer.Argument(help="launch config (YAML)")]


def cache_dir() -> Path:
    """Where models and compiled programs are kept: $PDD_CACHE, else ~/.cache/pdd."""
    return Path(os.environ.get("PDD_CACHE") or Path.home() / ".cache" / "pdd")


def _fail(message: object, status: int = 1) -> typer.Exit:
    Console(stderr=True, soft_wrap=True, highlight=False, markup=False).print(f"pdd: {message}")
    return typer.Exit(status)


def _writable(option: typer.CallbackParam, path: Path | None) -> Path | None:
    """Refuse a file that cannot be written before minutes of work, not after."""
    if path is not None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            was_there = path.exists()
            path.open("a").close()
            if not was_there:
                path.unlink()
        except OSError as error:
            raise _fail(f"{option.opts[0]}: given {str(path)!r}, which cannot be written: {error.strerror}", 2) from error
    return path


@app.command()
def serve(
    config: ConfigArgument = _DEFAULT_CONFIG,
    question: Annotated[str | None, typer.Option("--ask", help="question to ask once ready; default: a long one that is shipped")] = None,
    quiet: Annotated[bool, typer.Option("--no-ask", help="ask nothing")] = False,
    once: Annotated[bool, typer.Option("--once", help="end after the answer; its last line is a JSON object")] = False,
    max_tokens: Annotated[int, typer.Option(help="length of that answer")] = 220,
) -> None:
    """Launch all processes of CONFIG on this machine, ask one question, keep serving."""
    from pdd.launch.ask import AskError
    from pdd.launch.local import Deployment, StartError
    from pdd.launch.serve import ask_and_show, demo_question, end_on_signal, hints, start, summary
    from pdd.launch.supervise import Supervisor
    from pdd.models import resolve

    console = Console(highlight=False)
    end_on_signal()
    try:
        launch = load(config)
        resolve(launch.model, cache_dir())
        with Deployment(launch, cache_dir()) as deployment:
            ready_s = start(deployment, console)
            if once or not quiet:
                answer = ask_and_show(deployment, console, question or demo_question(), max_tokens)
            if not once:
                hints(deployment, console)
                raise typer.Exit(Supervisor(deployment, lambda line: console.print(line, style="red", soft_wrap=True)).run())
        print(summary(answer, ready_s), flush=True)
    except (ValueError, StartError, AskError) as error:
        raise _fail(error) from error
    except KeyboardInterrupt:
        console.print("ended")


@app.command()
def pull(model: Annotated[str, typer.Argument(help="smollm2-135m, or org/name on a model hub")]) -> None:
    """Fetch a model into the cache and check it."""
    from pdd.models import pull as fetch

    try:
        print(fetch(model, cache_dir()))
    except (ValueError, OSError) as error:
        raise _fail(error) from error


@app.command()
def check(config: ConfigArgument) -> None:
    """Validate a launch config and the models it names; print what would be started."""
    from pdd.models import resolve
    from pdd.serving.text.model import TextModel
    from pddbridge.checkpoint import open_checkpoint

    try:
        launch = load(config)
        for model in dict.fromkeys([launch.model, *(worker.model or launch.model for worker in launch.workers)]):
            model_dir = resolve(model, cache_dir())
            open_checkpoint(model_dir)
            TextModel.load(model_dir)
            print(f"model {model}: {model_dir}")
    except ValueError as error:
        raise _fail(error) from error
    for worker in launch.workers:
        print(f"{worker.name}: {worker.role} on {worker.engine}:{worker.device} at site {worker.site}, page {worker.page_size}")


def _wide_console() -> Console:
    """Where nobody reads along (a file, a pipe) tables need not fit into 80 columns."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=200)


@app.command()
def conform(
    a: Annotated[str, typer.Option("--a", help="ENGINE:DEVICE of one side, as in jax:cpu")],
    b: Annotated[str, typer.Option("--b", help="ENGINE:DEVICE of the other, as in torch:cuda")],
    model: Annotated[str, typer.Option("--model", help="what both should be: smollm2-135m, org/name once pulled, or a directory")],
    model_b: Annotated[str | None, typer.Option("--model-b", help="where b finds it, if elsewhere: the same model in another form")] = None,
    dtype: Annotated[str, typer.Option(help="of compute and KV: float32, bfloat16 or both")] = "both",
    levels: Annotated[str, typer.Option(help="some of L0,L1,L2,L3,L4")] = "L0,L1,L2,L3,L4",
    seed: Annotated[int, typer.Option(help="of prompts, bits and sampling")] = 0,
    prompt: Annotated[str, typer.Option(help="text, or random ids for a model without a tokenizer (which L4 needs)")] = "text",
    prompt_tokens: Annotated[int, typer.Option(help="of the prompt that is handed over")] = 270,
    threads: Annotated[int, typer.Option(help="of each engine on the host")] = 1,
    page_a: Annotated[int, typer.Option(help="page size of a's KV, tokens")] = 32,
    page_b: Annotated[int, typer.Option(help="page size of b's KV, tokens")] = 16,
    json_file: Annotated[Path | None, typer.Option("--json", callback=_writable, help="write the report here")] = None,
) -> None:
    """Whether two engines on their devices agree, from bytes to whole streams. Exit status 1 when a level fails, 2 for wrong options."""
    from pdd.conform.command import Request, conform_status

    request = Request(a, b, model, model_b, dtype, levels, seed, prompt, prompt_tokens, threads, (page_a, page_b), json_file)
    try:
        status = conform_status(request, cache_dir(), _wide_console())
    except (ValueError, OSError, RuntimeError) as error:  # frameworks raise RuntimeError for a device they do not have
        raise _fail(error, 2) from error
    raise typer.Exit(status)


@app.command("compile")
def compile_targets(
    target: Annotated[list[str], typer.Option("--target", help="tpu-v5e, tpu-v6e, tpu-v5p, cuda-sm80, cuda-sm90, hip-gfx942; or all")],
    small: Annotated[bool, typer.Option("--small", help="each kernel at one shape, no whole steps")] = False,
    jobs: Annotated[int, typer.Option(min=1, help="compiling processes at once")] = 1,
    json_file: Annotated[Path | None, typer.Option("--json", callback=_writable, help="write the rows here")] = None,
) -> None:
    """Compile every kernel, and for TPUs whole engine steps, for chips that are not here. Exit status 1 when something does not compile,
    2 for wrong options."""
    from pdd.compile.command import compile_status
    from pdd.launch.serve import end_on_signal

    end_on_signal()
    try:
        raise typer.Exit(compile_status(target, small, jobs, json_file, Console(highlight=False)))
    except (ValueError, OSError) as error:
        raise _fail(error, 2) from error


@bench.command()
def ttft(
    config: ConfigArgument = _DEFAULT_CONFIG,
    num_requests: Annotated[int, typer.Option("--num-prompts", help="requests per mode")] = 10,
    input_len: Annotated[int, typer.Option("--random-input-len", help="prompt tokens")] = 1000,
    output_len: Annotated[int, typer.Option("--random-output-len", help="output tokens")] = 128,
    rate_mbit_s: Annotated[float | None, typer.Option("--link-rate-mbit-s", help="of the emulated link; default: the config's")] = None,
    seed: Annotated[int, typer.Option(help="of the prompts")] = 0,
    json_file: Annotated[Path | None, typer.Option("--json", callback=_writable, help="write the figures here")] = None,
    plot_file: Annotated[Path | None, typer.Option("--plot", callback=_writable, help="draw the figures here (PNG or SVG)")] = None,
) -> None:
    """Same-site split, cross-site split and PDD in one run on one prompt set: TTFT, gaps, end to end, KV moved."""
    from pdd.bench.ttft import Plan, run, save_plot, show, with_link_rate
    from pdd.launch.ask import AskError
    from pdd.launch.local import StartError
    from pdd.launch.serve import end_on_signal
    from pdd.models import resolve

    console = Console(highlight=False)
    end_on_signal()
    try:
        launch = load(config) if rate_mbit_s is None else with_link_rate(load(config), rate_mbit_s)
        resolve(launch.model, cache_dir())
        results = run(launch, cache_dir(), Plan(num_requests, input_len, output_len, seed), console, json_file)
        show(results, console)
        if plot_file is not None:
            save_plot(results, plot_file)
    except (ValueError, OSError, StartError, AskError) as error:
        raise _fail(error) from error


@bench.command()
def handoff(
    config: ConfigArgument = _DEFAULT_CONFIG,
    rounds: Annotated[int, typer.Option(help="handoffs per length and route")] = 15,
    rate_mbit_s: Annotated[float, typer.Option(help="of the emulated link")] = 100.0,
    rtt_ms: Annotated[float, typer.Option(help="of the emulated link")] = 20.0,
    jitter_ms: Annotated[float, typer.Option(help="of the emulated link")] = 5.0,
    background_tokens: Annotated[int, typer.Option(help="mean size of the other transfers on the link; 0: none")] = 300,
    seed: Annotated[int, typer.Option(help="of tokens and background")] = 0,
    json_file: Annotated[Path | None, typer.Option("--json", callback=_writable, help="write the rows here")] = None,
    plot_file: Annotated[Path | None, typer.Option("--plot", callback=_writable, help="draw them here (PNG or SVG)")] = None,
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
        launch = load(config)
        resolve(launch.model, cache_dir())
        link = EmulatedLink(rate_mbit_s=rate_mbit_s, rtt_ms=rtt_ms, jitter_ms=jitter_ms)
        plan = Plan(link, rounds=rounds, background_tokens=background_tokens, seed=seed)
        rows = run(launch, cache_dir(), plan, console, json_file)
        show(rows, plan, console)
        if plot_file is not None:
            save_plot(rows, plot_file)
    except (ValueError, OSError, StartError, AskError) as error:
        raise _fail(error) from error


@bench.command()
def engine(
    model: Annotated[str, typer.Option(help="a pulled model's name, or a directory")] = "smollm2-135m",
    subjects: Annotated[str, typer.Option("--engines", help="engine:dtype, separated by commas")] = "jax:float32,torch:bfloat16",
    streams: Annotated[str, typer.Option(help="rows of the decode cases, separated by commas")] = "1,4,8,16",
    context: Annotated[int, typer.Option(help="tokens that a decode case's rows have")] = 200,
    long_context: Annotated[int, typer.Option(help="tokens of one more case of one row; 0: none")] = 2000,
    prompts: Annotated[str, typer.Option(help="lengths of the prefill cases, separated by commas")] = "256,1024,2048",
    steps: Annotated[int, typer.Option(help="decode steps per case and round")] = 32,
    rounds: Annotated[int, typer.Option(help="rounds; figures are medians")] = 5,
    threads: Annotated[int, typer.Option(help="compute threads of each subject")] = 2,
    json_file: Annotated[Path | None, typer.Option("--json", callback=_writable, help="write the rows here")] = None,
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
        )
        show(run(resolve(model, cache_dir()), cache_dir(), plan, console, json_file), console)
    except (ValueError, OSError, ChildError) as error:
        raise _fail(error) from error


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
    json_file: Annotated[Path | None, typer.Option("--json", callback=_writable, help="write the rows here")] = None,
    plot_file: Annotated[Path | None, typer.Option("--plot", callback=_writable, help="draw them here (PNG or SVG)")] = None,
) -> None:
    """Prefill throughput over prefix-hit rates from 0 to 95 %. Exit status 1 when a point dips below the line between its neighbours."""
    from pdd.bench.engine_subject import ChildError
    from pdd.bench.hits import Plan, run, save_plot, show
    from pdd.launch.serve import end_on_signal
    from pdd.models import resolve

    console = _wide_console()
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
        raise _fail(error) from error
    if any(row.dips for row in rows):
        raise typer.Exit(1)


@bench.command()
def steady(
    config: ConfigArgument = _DEFAULT_CONFIG,
    minutes: Annotated[float, typer.Option(help="of traffic")] = 10.0,
    clients: Annotated[int, typer.Option(help="that each ask one thing after another")] = 3,
    pause_s: Annotated[float, typer.Option(help="mean pause of a client between requests")] = 0.5,
    seed: Annotated[int, typer.Option(help="of the traffic")] = 0,
    json_file: Annotated[Path | None, typer.Option("--json", callback=_writable, help="write the report here")] = None,
) -> None:
    """Whether a deployment under mixed traffic stays as it was: compilations, memory, event loops, ledgers. Exit status 1 when not."""
    from pdd.bench.steady import Plan, run, show
    from pdd.launch.ask import AskError
    from pdd.launch.local import StartError
    from pdd.launch.serve import end_on_signal

    console = _wide_console()
    end_on_signal()
    try:
        report = run(load(config), cache_dir(), Plan(minutes, clients, pause_s, seed=seed), console, json_file)
    except (ValueError, OSError, StartError, AskError) as error:
        raise _fail(error) from error
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


if __name__ == "__main__":
    app()
