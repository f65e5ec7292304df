"""Case 81 from end to end: main dies in the middle of an answer and nobody can go on. Both doors, the coordinator, scripted workers."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence

import grpc
import grpc.aio
import openai
import pytest

from pdd.serving.coordinator import Coordinator
from pdd.serving.request import Delta, GenerationRequest
from pdd.serving.text.model import TextModel
from pddbridge.rpc.gen import common_pb2, inference_pb2, inference_pb2_grpc
from tests.support.doors import Doors, open_doors
from tests.support.scripted_coordinator import ScriptedCoordinator, letter_id
from tests.support.scripted_workers import Cluster, serving
from tests.support.worker_script import Script

pytestmark = pytest.mark.asyncio(loop_scope="module")

ROLES = (("prefill-0", "prefill", "a"), ("main-0", "main", "b"))
NUM_PROMPT, MAX_TOKENS = 20, 200
BODY = {"model": "scripted", "prompt": list(range(40, 40 + NUM_PROMPT)), "max_tokens": MAX_TOKENS}


def next_letter(prompt_ids: Sequence[int], log_ids: Sequence[int]) -> int:
    return letter_id(chr(ord("a") + len(log_ids) % 26))


class WithoutSpare(ScriptedCoordinator):
    """A real coordinator's answers. Main breaks off by its script; once it has begun, it takes nobody else."""

    def __init__(self, text: TextModel, coordinator: Coordinator, cluster: Cluster) -> None:
        super().__init__(text, limits=coordinator.limits)  # type: ignore[arg-type]
        self._coordinator = coordinator
        self._cluster = cluster

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Delta, None]:
        async for delta in self._coordinator.generate(request):
            self._cluster.worker("main").script.refuse = ("UNAVAILABLE", "gone")
            yield delta


async def over_http(doors: Doors) -> None:
    events = await doors.events("/v1/completions", {**BODY, "stream_options": {"include_usage": True}})
    assert "[DONE]" not in events
    error = json.loads(events[-1])["error"]
    assert (error["code"], error["type"]) == ("unavailable", "server_error")
    chunks = [json.loads(data) for data in events[:-1]]
    assert "".join(choice["text"] for chunk in chunks for choice in chunk["choices"]) == "abcde"
    assert all(choice["finish_reason"] is None for chunk in chunks for choice in chunk["choices"])


async def whole_over_http(doors: Doors) -> None:
    answer = await doors.post("/v1/completions", BODY)
    assert answer.status_code == 503
    assert "choices" not in answer.json()


async def official_client(doors: Doors) -> None:
    stream = await doors.openai.completions.create(**BODY, stream=True)
    said = []

    async def read() -> None:
        async for chunk in stream:
            said.append(chunk.choices[0])  # noqa: PERF401 - what came before the failure counts

    with pytest.raises(openai.APIError):
        await read()
    assert "".join(choice.text for choice in said) == "abcde"
    assert all(choice.finish_reason is None for choice in said)


async def over_grpc(doors: Doors) -> None:
    prompt = inference_pb2.TokenIds(ids=BODY["prompt"])
    call = inference_pb2_grpc.InferenceStub(doors.channel).Generate(
        inference_pb2.GenerateRequest(token_ids=prompt, max_tokens=MAX_TOKENS, tokens_only=True)
    )
    said = []

    async def read() -> None:
        async for response in call:
            said.append(response)  # noqa: PERF401 - what came before the failure counts

    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await read()
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert sum(len(response.tokens) for response in said) == 5
    assert all(response.finish_reason == common_pb2.FINISH_REASON_UNSPECIFIED for response in said)


@pytest.mark.parametrize("client", [over_http, whole_over_http, official_client, over_grpc], ids=lambda client: client.__name__)
async def test_case_81_an_answer_that_breaks_off_is_an_error_and_what_was_made_is_logged(
    client: Callable[[Doors], Coroutine[None, None, None]], text: TextModel, caplog: pytest.LogCaptureFixture
) -> None:
    scripts = {"main-0": Script(break_at=5)}
    async with serving(next_letter, roles=ROLES, scripts=scripts, text_model=text) as (cluster, coordinator):
        with caplog.at_level(logging.WARNING, logger="pdd.serving.coordinator"):
            async with open_doors(WithoutSpare(text, coordinator, cluster)) as doors, asyncio.timeout(60):
                await client(doors)
        assert f"prompt tokens {NUM_PROMPT}, generated 5" in caplog.text
        sample = coordinator.metrics.registry.get_sample_value
        assert sample("pdd:requests_total", {"outcome": "unavailable"}) == 1
        assert sample("pdd:generation_tokens_total", {"origin": "main"}) == 5
