"""L4: the same through real worker processes, sockets and the public API: tokens of one engine alone, KV moved, main prefilled nothing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np

from pdd.config import LaunchConfig
from pdd.conform.judge import Stream, judge_streams
from pdd.conform.oracle import Oracle
from pdd.conform.plan import TOLERANCES, Plan
from pdd.conform.report import Check, within
from pdd.conform.side import Dtype, Side
from pdd.conform.single_run import single_engine_runs
from pdd.launch.ask import Answer, AskError, ask
from pdd.launch.local import Deployment, StartError
from pddbridge.sampling_params import SamplingParams

_MAX_ROWS: Final = 4
_STEP_TOKENS: Final = 64


def check_system(
    sender: Side, receiver: Side, way: str, dtype: Dtype, prompt: np.ndarray, plan: Plan, cache_dir: Path, oracle: Oracle
) -> tuple[Check, ...]:
    """``sender`` prefills and relays, ``receiver`` is main decode. On a device that only one process may open (a TPU) nobody relays."""
    relays = sender.platform != "tpu"
    config = launch_config(sender, receiver, dtype, plan, relays=relays)
    try:
        with Deployment(config, cache_dir) as deployment:
            deployment.start()
            return _checks(deployment, way, dtype, prompt.tolist(), plan, oracle, relays)
    except (StartError, AskError, OSError) as error:
        return (Check("L4", dtype, way, "could not be carried out", False, note=" ".join(str(error).split())[:300]),)


def launch_config(sender: Side, receiver: Side, dtype: Dtype, plan: Plan, *, relays: bool) -> LaunchConfig:
    """Two sites over plain TCP, one worker per role."""

    def worker(name: str, role: str, side: Side) -> dict[str, object]:
        return {
            "name": name,
            "role": role,
            "site": f"site-{side.name}",
            "engine": side.engine,
            "device": side.device,
            "model": str(side.model_dir),
            "compute_dtype": dtype,
            "page_size": side.page_size,
            "num_pages": -(-plan.sizes.context_tokens // side.page_size) * (_MAX_ROWS + 1),
            "max_context_tokens": plan.sizes.context_tokens,
            "max_step_tokens": _STEP_TOKENS,
            "max_rows": _MAX_ROWS,
            "threads": plan.threads,
        }

    workers = [worker("prefill-0", "prefill", sender), worker("main-0", "main", receiver)]
    if relays:
        workers.insert(1, worker("relay-0", "relay", sender))
    return LaunchConfig.model_validate(
        {
            "model": str(sender.model_dir),
            "kv_dtype": dtype,
            "sites": [f"site-{sender.name}", f"site-{receiver.name}"],
            "workers": workers,
            "serving": {"site": f"site-{sender.name}", "allow_override": True},
            "policy": {"pipeline": "relay" if relays else "direct"},
        }
    )


def _checks(
    deployment: Deployment, way: str, dtype: Dtype, prompt: list[int], plan: Plan, oracle: Oracle, relays: bool
) -> tuple[Check, ...]:
    tie = TOLERANCES[dtype].tie
    handoffs = plan.handoffs if relays else (0,)
    alone = str(deployment.topology.worker("prefill-0").control)
    expected = single_engine_runs(alone, [(prompt, params) for params in plan.samplers.values()])
    checks = []
    for (name, params), tokens in zip(plan.samplers.items(), expected, strict=True):
        bodies = [_body(deployment.config.model, prompt, params, handoff if relays else None, f"{name}-{handoff}") for handoff in handoffs]
        # One after another: a relay that does not answer at once, for want of room or in the middle of a long step, is not waited for.
        answers = [ask(f"{deployment.http_url}/v1/completions", body) for body in bodies]
        streams = [Stream(handoff, _ids(answer)) for handoff, answer in zip(handoffs, answers, strict=True)]
        found = judge_streams(streams, tokens, oracle, prompt, params)
        note = f"{found.num_equal} of {len(streams)} handoffs give the sender's own tokens"
        passed = within(found.margin, tie)
        checks.append(Check("L4", dtype, way, f"{name} answers", passed, found.margin, tie, found.where, note, found.parting))
        checks.append(_check_moved(way, dtype, name, prompt, plan, handoffs, answers))
    return tuple(checks)


def _check_moved(
    way: str, dtype: Dtype, name: str, prompt: list[int], plan: Plan, handoffs: Sequence[int], answers: Sequence[Answer]
) -> Check:
    """The prompt's KV crossed, main prefilled nothing, nobody fell back, and each token came from whom it should."""
    wrong, num_bytes = [], 0
    for handoff, answer in zip(handoffs, answers, strict=True):
        origins = [piece.origin for piece in answer.pieces for _ in piece.token_ids]
        said = answer.timeline
        num_bytes += int(said.get("wan_kv_bytes") or 0)
        facts: dict[str, tuple[object, object]] = {
            "tokens by relay": (origins.count("relay"), handoff),
            "tokens by main": (origins.count("main"), plan.stream_tokens - handoff),
            "wan_kv_tokens": (said.get("wan_kv_tokens"), len(prompt) - 1),
            "wan_kv_bytes above 0": (bool(said.get("wan_kv_bytes")), True),
            "main_prefill_tokens": (said.get("main_prefill_tokens"), 0),
            "fallbacks": (said.get("fallbacks"), 0),
        }
        differing = [f"{what} {got}, must be {want}" for what, (got, want) in facts.items() if got != want]
        if differing:
            wrong.append(f"handoff at {handoff} ({said.get('pipeline_reason')}): {', '.join(differing)}")
    note = "; ".join(wrong) if wrong else f"{num_bytes / 1e6:.1f} MB of KV, main prefilled nothing"
    return Check("L4", dtype, way, f"{name}: KV moved", not wrong, note=note)


def _ids(answer: Answer) -> list[int]:
    return [token_id for piece in answer.pieces for token_id in piece.token_ids]


def _body(model: str, prompt: list[int], params: SamplingParams, handoff: int | None, salt: str) -> dict[str, object]:
    """An OpenAI completion request for exactly ``params`` (of the fields that :class:`Plan` sets), cold in every prefix cache."""
    return {
        "model": model,
        "prompt": prompt,
        "seed": params.seed,
        "max_tokens": params.max_tokens,
        "temperature": params.temperature,
        "repetition_penalty": params.repetition_penalty,
        "ignore_eos": params.ignore_eos,
        "cache_salt": salt,
        "pdd": {"pipeline": "direct"} if handoff is None else {"pipeline": "relay", "handoff": "one_shot", "handoff_at": handoff},
    }
