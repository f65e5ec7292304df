"""A deployment with everything on: mutual TLS between all processes, TLS and API keys at the doors, two tenants. Real processes."""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import httpx
import pytest

from pdd.certs import issue, issue_all, make_authority, write_pair
from pdd.config import LaunchConfig
from pdd.launch.local import Deployment
from pdd.serving.accounts import add_key
from pddbridge.rpc.gen import inference_pb2, inference_pb2_grpc, worker_pb2, worker_pb2_grpc
from pddbridge.sampling_params import SamplingParams
from pddbridge.tls import identity
from tests.support.clients import Streamed, body_of, complete
from tests.support.deployments import assert_idle, launch_config, ledger, worker_channel
from tests.support.ports import assert_only_configured, bomb, throw_everywhere

pytestmark = [pytest.mark.system, pytest.mark.slow]

POLL_S = 0.05
PARAMS = SamplingParams(seed=1, max_tokens=12, temperature=0.0, ignore_eos=True)
PROMPT = [10 + (7 * i) % 240 for i in range(100)]


@dataclass(frozen=True)
class Secured:
    deployment: Deployment
    certs: Path
    keys: dict[str, str]
    model: str

    @property
    def door_context(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=str(self.certs / "ca.pem"))

    async def ask(self, tenant: str, prompt: list[int], **changes: object) -> Streamed:
        headers = {"authorization": f"Bearer {self.keys[tenant]}"}
        async with httpx.AsyncClient(verify=self.door_context, headers=headers, timeout=60, trust_env=False) as client:
            wanted = body_of(self.model, prompt, PARAMS, pipeline="relay", handoff_at=5)
            return await complete(client, self.deployment.http_url, {**wanted, **changes})


@pytest.fixture(scope="module")
def secured_module(tiny_model: Path, cache_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    directory = tmp_path_factory.mktemp("secured")
    certs, key_file = directory / "certs", directory / "keys.yaml"
    keys = {tenant: add_key(key_file, tenant) for tenant in ("alice", "bob")}
    plain = launch_config(str(tiny_model), engines=("torch", "torch", "torch"))
    security = {
        "worker_tls": "mutual",
        "ca": str(certs / "ca.pem"),
        "cert": str(certs / "{name}.pem"),
        "key": str(certs / "{name}.key"),
        "door_cert": str(certs / "door.pem"),
        "door_key": str(certs / "door.key"),
        "api_keys": str(key_file),
    }
    # TCP within the site too, so that all KV passes TLS.
    config = LaunchConfig.model_validate({**plain.model_dump(mode="json"), "security": security, "local_link": "tcp"})
    issue_all(config, certs, door_hosts=["127.0.0.1", "localhost"])
    with Deployment(config, cache_dir, directory / "run") as deployment:
        deployment.start()
        yield Secured(deployment, certs, keys, str(tiny_model))


@pytest.fixture
def secured(secured_module: Secured) -> Iterator[Secured]:
    yield secured_module
    assert_idle(secured_module.deployment)


async def test_a_relayed_request_runs_over_tls_and_main_prefills_nothing(secured: Secured) -> None:
    before = ledger(secured.deployment, "main-0")
    answer = await secured.ask("alice", PROMPT, cache_salt="first")
    assert answer.error is None, answer.error
    assert answer.finish_reasons == ["length"]
    assert answer.origins == ["relay"] * 5 + ["main"] * 7
    assert answer.number("wan_kv_tokens") == len(PROMPT) - 1
    assert answer.number("main_prefill_tokens") == 0
    after = ledger(secured.deployment, "main-0")
    assert after.kv_bytes_received - before.kv_bytes_received == answer.number("wan_kv_bytes") > 0
    alone = await secured.ask("alice", PROMPT, cache_salt="second", pdd={"pipeline": "direct"})
    assert alone.ids == answer.ids


async def test_no_tenant_learns_what_another_has_cached(secured: Secured) -> None:
    """Case 118. The salt that the first tenant used is known to the second, and is of no use to it."""
    prompt = [250 - (11 * i) % 240 for i in range(129)]
    deployment, salt = secured.deployment, {"cache_salt": "known"}

    async def asked(tenant: str, **changes: object) -> tuple[Streamed, int]:
        """And how many prompt tokens prefill computed for it."""
        before = ledger(deployment, "prefill-0").computed_prompt_tokens
        answer = await secured.ask(tenant, prompt, **changes)
        assert answer.error is None, answer.error
        assert_idle(deployment)
        return answer, ledger(deployment, "prefill-0").computed_prompt_tokens - before

    primed, computed = await asked("alice", **salt)
    assert (computed, primed.number("main_hit_tokens")) == (len(prompt) - 1, 0)
    for changes in (salt, {}, {"cache_salt": "../alice/known"}, {"cache_salt": "alice/known"}):
        other, computed = await asked("bob", **changes)
        assert computed == len(prompt) - 1, changes
        assert other.number("main_hit_tokens") == 0
        assert other.number("wan_kv_tokens") == len(prompt) - 1
        assert other.usage["prompt_tokens_details"] == {"cached_tokens": 0}
        assert other.ids == primed.ids
    again, computed = await asked("alice", **salt)
    assert computed < 32
    assert again.number("main_hit_tokens") >= len(prompt) - 1 - 16
    assert again.ids == primed.ids


def test_the_doors_want_tls_and_a_key(secured: Secured) -> None:
    topology, context = secured.deployment.topology, secured.door_context
    url = secured.deployment.http_url
    assert httpx.get(f"{url}/v1/models", verify=context).status_code == 401
    assert httpx.get(f"{url}/metrics", verify=context).status_code == 401
    assert httpx.get(f"{url}/health", verify=context).status_code == 200
    with pytest.raises(httpx.HTTPError):
        httpx.get(f"http://{topology.http}/health")
    with pytest.raises(httpx.ConnectError, match="certificate"):
        httpx.get(f"{url}/health")
    credentials = grpc.ssl_channel_credentials((secured.certs / "ca.pem").read_bytes())
    with grpc.secure_channel(str(topology.grpc), credentials) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        with pytest.raises(grpc.RpcError) as refused:
            stub.ListModels(inference_pb2.ListModelsRequest(), timeout=10)
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        metadata = (("authorization", f"Bearer {secured.keys['bob']}"),)
        request = inference_pb2.GenerateRequest(text="hi", max_tokens=3, ignore_eos=True)
        tokens = [t for r in stub.Generate(request, timeout=30, metadata=metadata) for t in r.tokens]
        assert len(tokens) == 3


def info(address: str, credentials: grpc.ChannelCredentials | None, peer: str) -> grpc.RpcError:
    """The error of a question to a worker's control port."""
    options = [("grpc.ssl_target_name_override", peer)]
    channel = grpc.insecure_channel(address) if credentials is None else grpc.secure_channel(address, credentials, options)
    with channel, pytest.raises(grpc.RpcError) as refused:
        worker_pb2_grpc.WorkerStub(channel).Info(worker_pb2.InfoRequest(), timeout=5)
    return refused.value


def test_a_worker_answers_nobody_but_its_coordinator(secured: Secured, tmp_path: Path) -> None:
    place = secured.deployment.topology.worker("main-0")
    peer, address, certs = identity("main-0", "main"), str(place.control), secured.certs
    ca = (certs / "ca.pem").read_bytes()
    with worker_channel(secured.deployment, "main-0") as channel:
        assert worker_pb2_grpc.WorkerStub(channel).Info(worker_pb2.InfoRequest(), timeout=10).ready
    # Another worker: its certificate is good, and not for this.
    own = grpc.ssl_channel_credentials(ca, (certs / "prefill-0.key").read_bytes(), (certs / "prefill-0.pem").read_bytes())
    refused = info(address, own, peer)
    assert refused.code() is grpc.StatusCode.PERMISSION_DENIED
    assert identity("prefill-0", "prefill") in refused.details()
    assert peer in refused.details()
    assert ledger(secured.deployment, "main-0").calls_refused == 1
    # Another authority, no certificate, no TLS.
    write_pair(tmp_path, "rogue", issue(make_authority(), "rogue", [identity("coordinator", "coordinator")]))
    rogue = grpc.ssl_channel_credentials(ca, (tmp_path / "rogue.key").read_bytes(), (tmp_path / "rogue.pem").read_bytes())
    for credentials in (rogue, grpc.ssl_channel_credentials(ca), None):
        assert info(address, credentials, peer).code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
    # A client that takes main for relay does not talk to it.
    coordinator = grpc.ssl_channel_credentials(ca, (certs / "coordinator.key").read_bytes(), (certs / "coordinator.pem").read_bytes())
    assert info(address, coordinator, identity("relay-0", "relay")).code() is grpc.StatusCode.UNAVAILABLE


def test_the_kv_port_refuses_whoever_has_no_certificate_and_says_whom(secured: Secured) -> None:
    place = secured.deployment.topology.worker("main-0")
    bare = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    bare.check_hostname, bare.verify_mode = False, ssl.CERT_NONE
    with socket.create_connection((place.kv.host, place.kv.port), timeout=10) as sock, bare.wrap_socket(sock) as tls:
        mine = f"('{tls.getsockname()[0]}', {tls.getsockname()[1]})"
        with pytest.raises(ssl.SSLError, match="CERTIFICATE_REQUIRED"):
            tls.recv(1)
    deadline_s = time.monotonic() + 5
    while not any("certificate differs" in line and mine in line and "'main-0'" in line for line in log_lines(secured, "main-0")):
        assert time.monotonic() < deadline_s, log_lines(secured, "main-0")[-5:]
        time.sleep(POLL_S)
    assert ledger(secured.deployment, "main-0").handshakes_refused >= 1


def log_lines(secured: Secured, worker: str) -> list[str]:
    return (secured.deployment.run_dir / f"{worker}.log").read_text().splitlines()


async def test_a_pickle_at_any_port_is_refused(secured: Secured, tmp_path: Path) -> None:
    """Case 109. In plaintext at every port, and within TLS where a client gets that far."""
    file = tmp_path / "boom"
    throw_everywhere(secured.deployment, bomb(file))
    headers = {"authorization": f"Bearer {secured.keys['bob']}", "content-type": "application/json"}
    for path in ("/v1/completions", "/v1/chat/completions"):
        answer = httpx.post(secured.deployment.http_url + path, content=bomb(file), headers=headers, verify=secured.door_context)
        assert answer.status_code == 400
    assert not file.exists()
    assert (await secured.ask("bob", PROMPT[:20])).error is None


def test_nothing_listens_but_on_the_configured_addresses(secured: Secured) -> None:
    assert_only_configured(secured.deployment)
