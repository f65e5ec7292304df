"""The official openai client and a gRPC client made from the shipped proto stream through the service; cancelling frees pages."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import grpc
import httpx
import openai
import pytest

from pddbridge.rpc.gen import inference_pb2, inference_pb2_grpc
from pddbridge.sampling_params import SamplingParams
from tests.support.clients import body_of, complete
from tests.support.deployments import assert_idle, ledger
from tests.system.conftest import Running

pytestmark = pytest.mark.system

LONG = {"max_tokens": 400, "temperature": 0.0, "extra_body": {"ignore_eos": True}}


def client_of(running: Running) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0)


def test_openai_client_streams_chat_and_plain_answers_agree(tiny: Running):
    client = client_of(tiny)
    messages = [{"role": "user", "content": "the rain in the land of the here and now " * 3}]
    common = {"model": tiny.model, "messages": messages, "max_tokens": 24, "seed": 7, "temperature": 1.0}
    plain = client.chat.completions.create(**common)
    chunks = list(client.chat.completions.create(**common, stream=True, stream_options={"include_usage": True}))
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == plain.choices[0].message.content
    assert plain.usage is not None
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == plain.usage.completion_tokens
    assert [m.id for m in client.models.list().data] == [tiny.model]


def test_openai_client_gets_openai_errors(tiny: Running):
    client = client_of(tiny)
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model=tiny.model, prompt=[[300_000]], max_tokens=4)
    assert refused.value.type == "invalid_request_error"
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="no-such-model", prompt="x", max_tokens=4)


def test_cancelling_the_openai_stream_frees_every_page_within_a_second(tiny: Running):
    stream = client_of(tiny).completions.create(model=tiny.model, prompt="once upon a time " * 5, stream=True, **LONG)
    for count, _ in enumerate(stream):
        if count == 4:
            break
    assert sum(ledger(tiny.deployment, name).num_requests for name in ("relay-0", "main-0")) > 0, (
        "the request must be alive when it is cancelled"
    )
    stream.close()
    assert_idle(tiny.deployment, within_s=1.0)


@pytest.mark.parametrize("after", ["headers", "first", "handoff"])
def test_disconnecting_at_any_time_frees_every_page(tiny: Running, after: str):
    """Case 36: the generators on both sides stop with the client."""

    async def run() -> None:
        body = body_of(tiny.model, list(range(10, 60)), SamplingParams(seed=1, max_tokens=400, temperature=0.0, ignore_eos=True))
        body |= {"stream": True, "pdd": {"pipeline": "relay", "report_origin": True}, "cache_salt": after}
        async with httpx.AsyncClient(timeout=60.0) as client, client.stream("POST", f"{tiny.url}/v1/completions", json=body) as response:
            if after != "headers":
                async for line in response.aiter_lines():
                    if after == "first" or '"origin": "main"' in line or '"origin":"main"' in line:
                        break

    asyncio.run(run())
    assert_idle(tiny.deployment, within_s=1.0)


def generate_client(tmp_path: Path) -> None:
    """Stubs made here and now from the proto files that are shipped, as a user would make them."""
    root = Path(__file__).parents[2] / "bridge" / "proto"
    files = [str(root / "pdd" / "v1" / name) for name in ("common.proto", "inference.proto")]
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{root}", f"--python_out={tmp_path}", f"--grpc_python_out={tmp_path}", *files]
    subprocess.run(command, check=True)
    assert (tmp_path / "pdd" / "v1" / "inference_pb2.py").is_file()


GRPC_CLIENT = """
import json, sys
sys.path.insert(0, sys.argv[1])
import grpc
from pdd.v1 import inference_pb2, inference_pb2_grpc
stub = inference_pb2_grpc.InferenceStub(grpc.insecure_channel(sys.argv[2]))
prompt = {"ids": list(range(10, 60))}
request = inference_pb2.GenerateRequest(token_ids=prompt, max_tokens=20, temperature=0.0, ignore_eos=True, tokens_only=True)
ids, origins, last = [], [], None
for message in stub.Generate(request, timeout=60):
    ids += [t.token_id for t in message.tokens]
    origins += [message.origin] * len(message.tokens)
    last = message
print(json.dumps({"ids": ids, "origins": origins, "usage": last.usage.completion_tokens, "reason": last.finish_reason,
                  "models": [m.name for m in stub.ListModels(inference_pb2.ListModelsRequest()).models]}))
"""


def test_a_grpc_client_generated_from_the_shipped_proto_streams(tiny: Running, tmp_path: Path):
    """In a process of its own, with nothing of ours on its path but what protoc made."""
    generate_client(tmp_path)
    command = [sys.executable, "-I", "-c", GRPC_CLIENT, str(tmp_path), str(tiny.deployment.topology.grpc)]
    said = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert len(said["ids"]) == said["usage"] == 20
    assert said["reason"] == 2
    assert said["models"] == [tiny.model]

    async def over_http() -> list[int]:
        async with httpx.AsyncClient(timeout=60.0) as client:
            params = SamplingParams(seed=1, max_tokens=20, temperature=0.0, ignore_eos=True)
            return (await complete(client, tiny.url, body_of(tiny.model, list(range(10, 60)), params))).ids

    assert asyncio.run(over_http()) == said["ids"]


def test_cancelling_the_grpc_stream_frees_every_page_within_a_second(tiny: Running):
    with grpc.insecure_channel(str(tiny.deployment.topology.grpc)) as channel:
        request = inference_pb2.GenerateRequest(token_ids={"ids": list(range(20, 90))}, max_tokens=400, temperature=0.0, ignore_eos=True)
        call = inference_pb2_grpc.InferenceStub(channel).Generate(request, timeout=60)
        for count, _ in enumerate(call):
            if count == 3:
                call.cancel()
                break
    assert_idle(tiny.deployment, within_s=1.0)
