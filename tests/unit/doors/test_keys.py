"""API keys at both doors: who gets in, as whom, how much, and what is said to the others."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import grpc
import httpx
import openai
import pytest
import yaml

from pdd.errors import PddError
from pdd.serving.accounts import CHECK_INTERVAL_S, Accounts, UnauthenticatedError, add_key, digest, read_tenants
from pdd.serving.request import GenerationRequest
from pdd.serving.tenant_limits import TenantLimits
from pdd.serving.text.model import TextModel
from pddbridge.rpc.gen import inference_pb2, inference_pb2_grpc
from tests.support.doors import Doors, open_doors, until
from tests.support.scripted_coordinator import Script, ScriptedCoordinator

COMPLETIONS = "/v1/completions"
ASK: dict[str, object] = {"model": "tiny", "prompt": "hi", "max_tokens": 3}


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "keys.yaml"


def limit(file: Path, tenant: str, **limits: int) -> None:
    raw = yaml.safe_load(file.read_text())
    raw[tenant] |= limits
    file.write_text(yaml.safe_dump(raw))


async def post(doors: Doors, key: str | None, **changes: object) -> httpx.Response:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    return await doors.post(COMPLETIONS, {**ASK, **changes}, **headers)


async def generate(doors: Doors, *metadata: tuple[str, str], **fields: object) -> list[inference_pb2.GenerateResponse]:
    stub = inference_pb2_grpc.InferenceStub(doors.channel)
    request = inference_pb2.GenerateRequest(text="hi", max_tokens=3, **fields)  # type: ignore[arg-type]
    return [response async for response in stub.Generate(request, metadata=metadata)]


async def test_a_key_names_the_tenant_at_both_doors_and_a_salt_only_narrows_it(text: TextModel, file: Path) -> None:
    alice, bob = add_key(file, "alice"), add_key(file, "bob")
    async with open_doors(ScriptedCoordinator(text), accounts=Accounts(file)) as doors:
        for key, fields in (
            (alice, {}),
            (bob, {"cache_salt": "../alice"}),
            (bob, {"cache_salt": "alice", "tenant": "alice", "user": "alice"}),
        ):
            assert (await post(doors, key, **fields)).status_code == 200
        await generate(doors, ("authorization", f"Bearer {bob}"), cache_salt="alice")
        assert [request.tenant for request in doors.coordinator.requests] == ["alice", "bob/../alice", "bob/alice", "bob/alice"]
        client = doors.openai.with_options(api_key=alice)
        await client.completions.create(**ASK)  # type: ignore[call-overload]
        assert doors.coordinator.requests[-1].tenant == "alice"


@pytest.mark.parametrize(
    "headers", [{}, {"authorization": "Bearer pdd-wrong"}, {"authorization": "Basic YWxpY2U6eA=="}, {"authorization": ""}]
)
async def test_without_a_valid_key_both_doors_say_so_and_nothing_runs(text: TextModel, file: Path, headers: dict[str, str]) -> None:
    add_key(file, "alice")
    accounts = Accounts(file)
    async with open_doors(ScriptedCoordinator(text), accounts=accounts) as doors:
        for path in (COMPLETIONS, "/v1/chat/completions", "/v1/models", "/version", "/metrics", "/nothing"):
            answer = await doors.http.request("POST" if "completions" in path else "GET", path, headers=headers, json=ASK)
            assert answer.status_code == 401, path
            assert answer.headers["www-authenticate"] == "Bearer"
            error = answer.json()["error"]
            assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")
            assert str(file) not in answer.text
        assert (await doors.http.get("/health", headers=headers)).status_code == 200
        with pytest.raises(openai.AuthenticationError):
            await doors.openai.completions.create(**ASK)  # type: ignore[call-overload]
        metadata = tuple(headers.items())
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await generate(doors, *metadata)
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await inference_pb2_grpc.InferenceStub(doors.channel).ListModels(inference_pb2.ListModelsRequest(), metadata=metadata)
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert not doors.coordinator.requests
        assert accounts.num_refused == 9


async def test_ids_of_requests_are_ours_whatever_a_client_calls_them(text: TextModel) -> None:
    """Case 39 at the gRPC door; the HTTP door's is in test_openai_lifecycle."""
    coordinator = ScriptedCoordinator(text, Script(pause_at=1))
    async with open_doors(coordinator) as doors:
        stub = inference_pb2_grpc.InferenceStub(doors.channel)
        request = inference_pb2.GenerateRequest(text="hi", max_tokens=3)
        calls = [stub.Generate(request, metadata=(("x-request-id", "same"),)) for _ in range(2)]
        await until(lambda: len(coordinator.running) == 2)
        # The call itself: a task that is cancelled while grpcio still begins its call leaves that call open.
        calls[0].cancel()
        await until(lambda: len(coordinator.running) == 1)
        coordinator.resume.set()
        assert [response async for response in calls[1]][-1].usage.completion_tokens == 3
        ids = {request.request_id for request in coordinator.requests}
        assert len(ids) == 2
        assert not any("same" in request_id for request_id in ids)


async def test_too_many_at_once_are_refused_until_one_ends(text: TextModel, file: Path) -> None:
    alice, bob = add_key(file, "alice"), add_key(file, "bob")
    limit(file, "alice", max_concurrent=2)
    async with open_doors(ScriptedCoordinator(text, Script(pause_at=1)), accounts=Accounts(file)) as doors:
        coordinator = doors.coordinator
        async with doors.http.stream(
            "POST", COMPLETIONS, json={**ASK, "stream": True, "n": 2}, headers={"authorization": f"Bearer {alice}"}
        ):
            await until(lambda: len(coordinator.running) == 2)
            answer = await post(doors, alice)
            assert answer.status_code == 429
            assert answer.json()["error"]["type"] == "rate_limit_error"
            assert int(answer.headers["retry-after"]) >= 1
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await generate(doors, ("authorization", f"Bearer {alice}"))
            assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert dict(refused.value.trailing_metadata() or ())["retry-after"] == "1"
            assert len(coordinator.running) == 2
            coordinator.resume.set()
            assert (await post(doors, bob)).status_code == 200  # another tenant does not feel it
        await doors.idle()
        assert (await post(doors, alice)).status_code == 200
        assert (await post(doors, alice, n=3)).status_code == 429  # three choices are three generations


async def test_tokens_per_minute_are_earned_back_and_a_salt_has_no_purse_of_its_own(text: TextModel, file: Path) -> None:
    add_key(file, "alice")
    limit(file, "alice", tokens_per_minute=60)
    clock, coordinator = Clock(), ScriptedCoordinator(text)
    async with open_doors(coordinator) as doors:
        assert (await doors.post(COMPLETIONS, ASK)).status_code == 200
    limits = TenantLimits(coordinator, Accounts(file), clock)
    salted = replace(coordinator.requests[-1], tenant="alice/salt")

    async def spend(request: GenerationRequest) -> None:
        async for _ in limits.generate(request):
            pass

    used = len(salted.prompt_ids) + 3
    for _ in range(-(-60 // used)):
        await spend(salted)
    with pytest.raises(PddError, match="60 per minute") as refused:
        await spend(replace(salted, tenant="alice"))
    wait_s = refused.value.retry_after_s
    assert wait_s is not None
    clock.now_s += wait_s - 1.1
    with pytest.raises(PddError, match="60 per minute"):
        await spend(salted)
    clock.now_s += 1.2
    await spend(salted)
    await spend(replace(salted, tenant="bob"))
    assert limits.num_refused == {("alice", "tokens"): 2}
    assert limits.running("alice") == 0


def test_the_file_is_read_again_when_it_changes_and_a_broken_one_changes_nothing(file: Path) -> None:
    clock = Clock()
    first = add_key(file, "alice")
    accounts = Accounts(file, clock)
    second = add_key(file, "alice")
    assert accounts.authenticate(f"Bearer {first}") == "alice"
    with pytest.raises(UnauthenticatedError):
        accounts.authenticate(f"Bearer {second}")
    clock.now_s += CHECK_INTERVAL_S
    assert accounts.authenticate(f"bearer {second}") == "alice"
    good = file.read_text()
    file.write_text("alice: {keys: [secret]}")
    clock.now_s += CHECK_INTERVAL_S
    assert accounts.authenticate(f"Bearer {first}") == "alice"
    assert accounts.num_unreadable == 1
    revoked = yaml.safe_load(good)
    revoked["alice"]["keys"].remove(digest(first))
    file.write_text(yaml.safe_dump(revoked))
    clock.now_s += CHECK_INTERVAL_S
    with pytest.raises(UnauthenticatedError):
        accounts.authenticate(f"Bearer {first}")


def test_keys_are_kept_as_hashes_and_long(file: Path) -> None:
    key = add_key(file, "alice")
    assert key not in file.read_text()
    assert digest(key) in file.read_text()
    assert len(key) > 40
    assert file.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("a/b: {}", "a/b"),
        ("alice: {keys: [x]}", "keys.0"),
        ("alice: {limit: 3}", "limit"),
        ("alice: {max_concurrent: 0}", "max_concurrent"),
        (json.dumps({"alice": {"keys": ["0" * 64]}, "bob": {"keys": ["0" * 64]}}), "bob has a key of alice"),
        ("[", "not YAML"),
        ("alice: {}\nbob: {}\nalice: {max_concurrent: 1}", "key 'alice' is given twice"),
        ("alice: {max_concurrent: yes}", "max_concurrent: given True, a number is expected"),
    ],
)
def test_a_wrong_file_is_refused_naming_what_is_wrong(file: Path, text: str, told: str) -> None:
    file.write_text(text)
    with pytest.raises(ValueError, match=told):
        read_tenants(file)
