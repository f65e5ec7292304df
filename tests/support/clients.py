"""A bare HTTP client of the OpenAI door that keeps what system tests look at: ids, who made them, finish reason, timeline, usage."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, field

import httpx

from pddbridge.sampling_params import SamplingParams


@dataclass
class Streamed:
    """Everything one streamed completion said."""

    ids: list[int] = field(default_factory=list)
    origins: list[str] = field(default_factory=list)
    text: str = ""
    finish_reasons: list[str] = field(default_factory=list)
    timeline: dict[str, object] = field(default_factory=dict)
    usage: dict[str, object] = field(default_factory=dict)
    done: bool = False
    error: dict[str, object] | None = None
    logprobs: list[object] = field(default_factory=list)

    def number(self, name: str) -> float:
        value = self.timeline[name]
        assert isinstance(value, int | float), (name, value)
        return value


async def complete(client: httpx.AsyncClient, url: str, body: dict[str, object], path: str = "/v1/completions") -> Streamed:
    """Stream one completion (or chat completion) to its end."""
    found = Streamed()
    extra = body.get("pdd")
    body = {
        **body,
        "stream": True,
        "stream_options": {"include_usage": True},
        "pdd": {**(extra if isinstance(extra, dict) else {}), "report_origin": True, "timeline": True},
    }
    async with client.stream("POST", url + path, json=body) as response:
        if response.status_code != 200:
            found.error = json.loads(await response.aread())["error"]
            return found
        async for line in response.aiter_lines():
            if not line.startswith("data: "):
                continue
            if line == "data: [DONE]":
                found.done = True
                continue
            chunk = json.loads(line[6:])
            if "error" in chunk:
                found.error = chunk["error"]
                continue
            found.usage = chunk.get("usage") or found.usage
            found.timeline = chunk.get("pdd", {}).get("timeline") or found.timeline
            for choice in chunk["choices"]:
                said = choice.get("pdd", {})
                found.timeline = said.get("timeline") or found.timeline
                found.ids += said.get("token_ids", [])
                found.origins += [said["origin"]] * len(said.get("token_ids", [])) if "origin" in said else []
                found.text += choice.get("text") or choice.get("delta", {}).get("content") or ""
                if choice.get("logprobs"):
                    found.logprobs.append(choice["logprobs"])
                if choice.get("finish_reason"):
                    found.finish_reasons.append(choice["finish_reason"])
    return found


def complete_all(url: str, bodies: Sequence[dict[str, object]], at_once: int = 4) -> list[Streamed]:
    """Run many, ``at_once`` concurrently, in order of the answers' bodies."""

    async def run() -> list[Streamed]:
        gate = asyncio.Semaphore(at_once)
        async with httpx.AsyncClient(timeout=120.0) as client:

            async def one(body: dict[str, object]) -> Streamed:
                async with gate:
                    return await complete(client, url, body)

            return list(await asyncio.gather(*map(one, bodies)))

    return asyncio.run(run())


def body_of(model: str, prompt_ids: Sequence[int], params: SamplingParams, **pdd: object) -> dict[str, object]:
    """The HTTP body that asks for exactly ``params`` (the fields tests vary), with the ``pdd`` extension fields given."""
    return {
        "model": model,
        "prompt": list(prompt_ids),
        "seed": params.seed,
        "max_tokens": params.max_tokens,
        "min_tokens": params.min_tokens,
        "temperature": params.temperature,
        "top_k": params.top_k or 0,
        "top_p": params.top_p,
        "min_p": params.min_p,
        "repetition_penalty": params.repetition_penalty,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "logit_bias": {str(i): b for i, b in params.logit_bias},
        "ignore_eos": params.ignore_eos,
        "stop_token_ids": sorted(params.stop_token_ids),
        "pdd": pdd,
    }
