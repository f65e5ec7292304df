"""Case 112: whatever a client says of hosts, ports, epochs or KV transfers, in bodies, headers or metadata, nobody is connected to."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator

import grpc
import httpx
import pytest

from pddbridge.rpc.gen import inference_pb2, inference_pb2_grpc
from tests.system.conftest import Running

pytestmark = pytest.mark.system


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    """Where the attacker waits."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        sock.setblocking(False)
        yield sock


def assert_nobody_came(listener: socket.socket) -> None:
    with pytest.raises(BlockingIOError):
        listener.accept()


def wishes(port: int) -> dict[str, dict[str, object]]:
    """What a client may try, by name."""
    there: dict[str, object] = {"remote_host": "127.0.0.1", "remote_port": port, "remote_engine_id": "x", "do_remote_prefill": True}
    return {
        "vllm": {"kv_transfer_params": there},
        "vllm, more": {"kv_transfer_params": {**there, "do_remote_decode": True, "remote_block_ids": [1, 2], "tp_size": 1}},
        "sglang": {"bootstrap_host": "127.0.0.1", "bootstrap_port": port, "bootstrap_room": 7},
        "bridge": {"bridge": {"host": "127.0.0.1", "port": port, "epoch": 1}},
        "bridge host": {"bridge_host": f"127.0.0.1:{port}"},
        "epoch": {"epoch": 1, "push_to": [{"host": "127.0.0.1", "port": port}]},
        "within ours": {"pdd": {"kv_host": "127.0.0.1", "kv_port": port}},
        "within ours, vllm": {"pdd": {"kv_transfer_params": there}},
    }


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_body_that_names_machines_is_refused(tiny: Running, listener: socket.socket, path: str) -> None:
    asked = {"prompt": [10, 20, 30]} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "a"}]}
    for name, fields in wishes(listener.getsockname()[1]).items():
        body = {"model": tiny.model, "max_tokens": 2, **asked, **fields}
        response = httpx.post(f"{tiny.url}{path}", json=body, timeout=30)
        assert response.status_code == 400, name
        assert response.json()["error"]["message"], name
    assert_nobody_came(listener)


def test_headers_and_metadata_that_name_machines_are_ignored(tiny: Running, listener: socket.socket) -> None:
    port = listener.getsockname()[1]
    there = {
        "kv_transfer_params": json.dumps({"remote_host": "127.0.0.1", "remote_port": port}),
        "epoch": "1",
        "bridge": f"127.0.0.1:{port}",
    }
    said = {**there, "bootstrap_host": "127.0.0.1", "bootstrap_port": str(port), "x-kv-host": f"127.0.0.1:{port}"}
    body = {
        "model": tiny.model,
        "prompt": [10, 20, 30],
        "max_tokens": 4,
        "temperature": 0,
        "pdd": {"timeline": True, "report_origin": True},
    }
    answers = [httpx.post(f"{tiny.url}/v1/completions", json=body, headers=headers, timeout=30).json() for headers in ({}, said)]
    ids = [answer["choices"][0]["pdd"]["token_ids"] for answer in answers]
    assert ids[0] == ids[1]
    asked = inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=[10, 20, 30]), max_tokens=4, temperature=0.0)
    with grpc.insecure_channel(str(tiny.deployment.topology.grpc)) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        for metadata in ((), tuple((key.replace("_", "-"), value) for key, value in said.items())):
            replies = list(stub.Generate(asked, timeout=30, metadata=metadata))
            assert [record.token_id for reply in replies for record in reply.tokens] == ids[0]
    assert_nobody_came(listener)


def test_a_grpc_request_has_no_field_that_names_a_machine() -> None:
    """Not one to be refused: there is none. A field that is unknown is dropped by the parser."""
    names = {field.name for field in inference_pb2.GenerateRequest.DESCRIPTOR.fields}
    assert not {
        name for name in names if any(word in name for word in ("host", "port", "addr", "epoch", "bridge", "kv_", "peer", "remote"))
    }
