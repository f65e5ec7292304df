"""Bad input through both doors: a 4xx in OpenAI's shape or the right gRPC status, nothing leaked, the next request served."""

from __future__ import annotations

import json

import grpc
import httpx
import pytest

from pddbridge.rpc.gen import inference_pb2, inference_pb2_grpc
from pddbridge.sampling_params import SamplingParams
from tests.support.clients import body_of, complete_all
from tests.system.conftest import Running

pytestmark = pytest.mark.system

OK = SamplingParams(seed=1, max_tokens=4, temperature=0.0, ignore_eos=True)

BAD_COMPLETIONS: dict[str, dict[str, object]] = {
    "empty prompt": {"prompt": ""},
    "empty ids": {"prompt": []},
    "negative id": {"prompt": [-1]},
    "id = vocabulary": {"prompt": [300]},
    "id = 2**31": {"prompt": [2**31]},
    "id = 2**63": {"prompt": [2**63]},
    "too long": {"prompt": [5] * 600},
    "prompt and output too long": {"prompt": [5] * 400, "max_tokens": 200},
    "max_tokens 0": {"max_tokens": 0},
    "max_tokens negative": {"max_tokens": -3},
    "temperature negative": {"temperature": -0.1},
    "top_p 0": {"top_p": 0},
    "top_p 2": {"top_p": 2},
    "n 0": {"n": 0},
    "n huge": {"n": 100_000},
    "logit_bias out of range": {"logit_bias": {"999999": 1.0}},
    "stop empty": {"stop": ""},
    "stop token out of range": {"stop_token_ids": [100_000]},
    "min over max": {"min_tokens": 9, "max_tokens": 3},
    "unknown pipeline": {"pdd": {"pipeline": "teleport"}},
    "kv host from a client": {"kv_transfer_params": {"remote_host": "127.0.0.1", "remote_port": 1}},
}


def body(running: Running, **changes: object) -> dict[str, object]:
    return {"model": running.model, "prompt": [10, 20, 30], "max_tokens": 4, **changes}


def served_next(running: Running) -> None:
    (answer,) = complete_all(running.url, [body_of(running.model, [10, 20, 30], OK)])
    assert len(answer.ids) == 4


@pytest.mark.parametrize("name", BAD_COMPLETIONS)
def test_bad_fields_are_refused_in_openai_shape(tiny: Running, name: str):
    response = httpx.post(f"{tiny.url}/v1/completions", json=body(tiny, **BAD_COMPLETIONS[name]), timeout=30)
    assert 400 <= response.status_code < 500, response.text
    error = response.json()["error"]
    assert error["message"]
    assert "\n" not in error["message"]
    assert error["type"]
    served_next(tiny)


@pytest.mark.parametrize(
    ("raw", "status"),
    [
        (b"{not json", 400),
        (b"[]", 400),
        (b'{"prompt": "a", "temperature": NaN}', 400),
        (b'{"prompt": "a", "temperature": 1e999}', 400),
        (b'{"prompt": "\\ud800", "max_tokens": 1}', 400),
        (b"\xff\xfe", 400),
        (b"", 400),
        (b'{"prompt": "' + b"x" * (5 * 1024 * 1024) + b'"}', 413),
    ],
    ids=["not json", "a list", "NaN", "infinite", "lone surrogate", "not utf-8", "empty body", "huge body"],
)
def test_bad_bodies(tiny: Running, raw: bytes, status: int):
    response = httpx.post(f"{tiny.url}/v1/completions", content=raw, headers={"Content-Type": "application/json"}, timeout=30)
    assert response.status_code == status, response.text
    assert json.loads(response.content)["error"]["message"]
    served_next(tiny)


def test_unknown_model_and_path(tiny: Running):
    assert httpx.post(f"{tiny.url}/v1/completions", json=body(tiny, model="nope")).status_code == 404
    assert httpx.get(f"{tiny.url}/v1/nowhere").status_code == 404
    assert httpx.get(f"{tiny.url}/v1/completions").status_code == 405


@pytest.mark.parametrize(
    ("request_fields", "code"),
    [
        ({"token_ids": {"ids": []}}, grpc.StatusCode.INVALID_ARGUMENT),
        ({"token_ids": {"ids": [-1]}}, grpc.StatusCode.INVALID_ARGUMENT),
        ({"token_ids": {"ids": [300]}}, grpc.StatusCode.INVALID_ARGUMENT),
        ({"text": ""}, grpc.StatusCode.INVALID_ARGUMENT),
        ({}, grpc.StatusCode.INVALID_ARGUMENT),
        ({"text": "x", "temperature": float("nan")}, grpc.StatusCode.INVALID_ARGUMENT),
        ({"text": "x", "model": "nope"}, grpc.StatusCode.NOT_FOUND),
        ({"text": "x", "tokens_only": True, "stop": ["y"]}, grpc.StatusCode.INVALID_ARGUMENT),
        ({"token_ids": {"ids": [5] * 600}}, grpc.StatusCode.INVALID_ARGUMENT),
    ],
)
def test_grpc_refuses_with_the_right_status(tiny: Running, request_fields: dict[str, object], code: grpc.StatusCode):
    with grpc.insecure_channel(str(tiny.deployment.topology.grpc)) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        with pytest.raises(grpc.RpcError) as refused:
            list(stub.Generate(inference_pb2.GenerateRequest(**request_fields), timeout=30))
    assert refused.value.code() == code
    served_next(tiny)


def test_two_requests_with_one_caller_id_get_each_their_own(tiny: Running):
    """Case 39: the caller's id is only echoed."""
    texts = []
    for prompt in ([10, 20, 30], [40, 50, 60]):
        sent = body(tiny, prompt=prompt, temperature=0, pdd={"report_origin": True})
        response = httpx.post(f"{tiny.url}/v1/completions", json=sent, headers={"X-Request-Id": "same"}, timeout=30)
        assert response.headers["X-Request-Id"] == "same"
        texts.append((response.json()["id"], response.json()["choices"][0]["pdd"]["token_ids"]))
    assert texts[0][0] != texts[1][0]
    assert texts[0][1] != texts[1][1]
