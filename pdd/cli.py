"""The `pdd` command: a composition root. Reads argv and environment, wires the parts, turns errors into one clear line and a status."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from pdd.bench.cli import bench
from pdd.chaos.cli import chaos
from pdd.cli_common import DEFAULT_CONFIG, ConfigArgument, api_key, cache_dir, fail, wide_console, writable
from pdd.config import load
from pdd.plan.cli import plan
from pdd.security_cli import mount
from pdd.sim.cli import sim
from pdd.workers_cli import workers

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Prefill and relay decode here, main decode there.")
app.add_typer(bench, name="bench")
app.add_typer(workers, name="workers")
app.command()(sim)
app.command()(plan)
app.command()(chaos)
mount(app)


@app.command()
def serve(
    config: ConfigArgument = DEFAULT_CONFIG,
    question: Annotated[str | None, typer.Option("--ask", help="question to ask once ready; default: a long one that is shipped")] = None,
    quiet: Annotated[bool, typer.Option("--no-ask", help="ask nothing")] = False,
    once: Annotated[bool, typer.Option("--once", help="end after the answer; its last line is a JSON object")] = False,
    max_tokens: Annotated[int, typer.Option(help="length of that answer", min=1)] = 220,
) -> None:
    """Launch all processes of CONFIG on this machine, ask one question, keep serving."""
    from pdd.launch.fleet import Fleet
    from pdd.launch.fleet_server import FleetServer
    from pdd.launch.local import Deployment, StartError
    from pdd.launch.serve import Question, ask_first, demo_question, end_on_signal, hints, start, summary
    from pdd.launch.supervise import Supervisor
    from pdd.models import resolve
    from pdd.serving.text.model_files import read_text_files

    console = Console(highlight=False)
    end_on_signal()
    try:
        if question == "":
            raise ValueError("--ask: given '', allowed a question; --no-ask asks nothing")
        launch = load(config)
        has_template = read_text_files(resolve(launch.model, cache_dir())).chat_template is not None
        asked = Question(demo_question() if question is None else question, max_tokens, has_template)
        with Deployment(launch, cache_dir()) as deployment:
            ready_s = start(deployment, console)
            if once or not quiet:
                answer = ask_first(launch, deployment.http_url, console, asked, api_key())
            if not once:
                hints(deployment, console)
                with FleetServer(Fleet(deployment), launch.survival.admin_host, launch.survival.admin_port) as fleet:
                    console.print(f"  pdd workers list --admin {fleet.at}", soft_wrap=True)
                    raise typer.Exit(Supervisor(deployment, lambda line: console.print(line, style="red", soft_wrap=True)).run())
        if answer is None:
            raise typer.Exit(1)
        print(summary(answer, ready_s), flush=True)
    except (ValueError, StartError) as error:
        raise fail(error) from error
    except KeyboardInterrupt:
        console.print("ended")


@app.command()
def pull(model: Annotated[str, typer.Argument(help="smollm2-135m, or org/name on a model hub")]) -> None:
    """Fetch a model into the cache and check it."""
    from pdd.models import pull as fetch

    try:
        print(fetch(model, cache_dir()))
    except (ValueError, OSError) as error:
        raise fail(error) from error


@app.command()
def profile(
    config: ConfigArgument,
    out: Annotated[Path, typer.Option("--out", callback=writable, help="config for pdd sim (YAML)")],
    json_file: Annotated[Path | None, typer.Option("--json", callback=writable, help="write what it is fitted to here")] = None,
) -> None:
    """Launch CONFIG, measure it in short requests of some minutes and write the simulator's config for it."""
    from pdd.bench.profile import profile as measure
    from pdd.bench.profile import save
    from pdd.launch.local import StartError
    from pdd.launch.serve import end_on_signal

    console = Console(highlight=False)
    end_on_signal()
    try:
        save(measure(load(config), cache_dir(), console, console.print, json_file), out)
    except (ValueError, OSError, StartError) as error:
        raise fail(error) from error


@app.command()
def validate(
    profiled: Annotated[Path, typer.Option("--profile", help="of CONFIG, by pdd profile")],
    config: ConfigArgument = DEFAULT_CONFIG,
    scenarios: Annotated[Path | None, typer.Option("--scenarios", help="what to run live and simulate (YAML)")] = None,
    measured: Annotated[Path | None, typer.Option("--measured", help="JSON of an earlier run: simulate again, run nothing")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", callback=writable, help="write scenarios and figures here")] = None,
    requests_file: Annotated[Path | None, typer.Option("--requests", callback=writable, help="write live requests here (JSONL)")] = None,
) -> None:
    """Scenarios through the live system and through the simulator. Exit status 1 when a figure is further off than allowed."""
    from pdd.bench import validate as validation
    from pdd.launch.ask import AskError
    from pdd.launch.local import StartError
    from pdd.launch.serve import end_on_signal
    from pdd.sim.against import show_errors
    from pdd.sim.config import load_sim_config

    console = wide_console()
    end_on_signal()
    try:
        spec = load_sim_config(profiled).spec()
        if (scenarios is None) == (measured is None):
            raise ValueError("either --scenarios or --measured must be given")
        if measured is not None:
            known = validation.load_measured(measured)
        else:
            assert scenarios is not None
            launch, known = load(config), []
            for scenario in validation.load_scenarios(scenarios):
                console.print(f"scenario {scenario.name}")
                known.append((scenario, validation.measure(launch, scenario, cache_dir(), console)))
        compared = [validation.compare(spec, scenario, live) for scenario, live in known]
    except (ValueError, OSError, StartError, AskError) as error:
        raise fail(error) from error
    found = [error for one in compared for error in one.errors]
    show_errors(found, console)
    if json_file is not None:
        validation.save(compared, json_file)
    if requests_file is not None:
        validation.save_requests(compared, requests_file)
    if not all(error.within for error in found):
        raise typer.Exit(1)


@app.command()
def check(config: ConfigArgument) -> None:
    """Validate a launch config and the models it names; print what would be started. Exit status 1 for what is wrong or missing here;
    what a worker at another address would miss on this machine is a warning."""
    from pdd.misfits import misfits, usable_cores
    from pdd.models import resolve
    from pdd.serving.text.model import TextModel
    from pddbridge.checkpoint import open_checkpoint

    try:
        launch = load(config)
        found = misfits(launch, usable_cores())
        for misfit in found:
            fail(misfit.line if misfit.here else f"warning: {misfit.line}")
        for model in dict.fromkeys([launch.model, *(worker.model or launch.model for worker in launch.workers)]):
            model_dir = resolve(model, cache_dir())
            open_checkpoint(model_dir)
            TextModel.load(model_dir)
            print(f"model {model}: {model_dir}")
    except ValueError as error:
        raise fail(error) from error
    for worker in launch.workers:
        print(f"{worker.name}: {worker.role} on {worker.engine}:{worker.device} at site {worker.site}, page {worker.page_size}")
    if any(misfit.here for misfit in found):
        raise typer.Exit(1)


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
    page_a: Annotated[int, typer.Option(help="page size of a's KV, tokens", min=1, max=1024)] = 32,
    page_b: Annotated[int, typer.Option(help="page size of b's KV, tokens", min=1, max=1024)] = 16,
    json_file: Annotated[Path | None, typer.Option("--json", callback=writable, help="write the report here")] = None,
) -> None:
    """Whether two engines on their devices agree, from bytes to whole streams. Exit status 1 when a level fails, 2 for wrong options."""
    from pdd.conform.command import Request, conform_status

    request = Request(a, b, model, model_b, dtype, levels, seed, prompt, prompt_tokens, threads, (page_a, page_b), json_file)
    try:
        status = conform_status(request, cache_dir(), wide_console())
    except (ValueError, OSError, RuntimeError) as error:  # frameworks raise RuntimeError for a device they do not have
        raise fail(error, 2) from error
    raise typer.Exit(status)


@app.command("compile")
def compile_targets(
    target: Annotated[list[str], typer.Option("--target", help="tpu-v5e, tpu-v6e, tpu-v5p, cuda-sm80, cuda-sm90, hip-gfx942; or all")],
    small: Annotated[bool, typer.Option("--small", help="each kernel at one shape, no whole steps")] = False,
    steps: Annotated[str | None, typer.Option(help="only whole steps, in this compute dtype: bfloat16, or int8 weights")] = None,
    jobs: Annotated[int, typer.Option(min=1, help="compiling processes at once")] = 1,
    json_file: Annotated[Path | None, typer.Option("--json", callback=writable, help="write the rows here")] = None,
) -> None:
    """Compile every kernel, and for TPUs whole engine steps, for chips that are not here. Exit status 1 when something does not compile,
    2 for wrong options."""
    from pdd.compile.command import compile_status
    from pdd.launch.serve import end_on_signal

    end_on_signal()
    try:
        raise typer.Exit(compile_status(target, small, jobs, json_file, Console(highlight=False), steps))
    except (ValueError, OSError) as error:
        raise fail(error, 2) from error


if __name__ == "__main__":
    app()
