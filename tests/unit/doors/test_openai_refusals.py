"""Bad input: a 4xx in OpenAI's shape that names the field, nothing started, and the next request served."""

from __future__ import annotations

import asyncio
import json

import openai
import pytest

from pdd.serving.text.model import TextModel
from tests.support.doors import SERVING, Doors, open_doors
from tests.support.scripted_coordinator import Limits, ScriptedCoordinator

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
MESSAGES = [{"role": "user", "content": "hello"}]
WHOLE = b'{"prompt": "x", "messages": [{"role": "user", "content": "x"}], %s}'


def ask(path: str, **fields: object) -> dict[str, object]:
    return {"model": "tiny", **({"messages": MESSAGES} if path == CHAT else {"prompt": "hello"}), **fields}


async def refused(doors: Doors, path: str, body: object, status: int = 400) -> dict[str, object]:
    """The error object; checks its shape, that nothing was started, and that the next request is served."""
    before = len(doors.coordinator.requests)
    answer = await doors.post(path, body)
    assert answer.status_code == status, answer.text
    assert len(doors.coordinator.requests) == before
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert "\n" not in error["message"]
    assert (await doors.post(path, ask(path, max_tokens=2))).status_code == 200
    return error


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'"text"',
        b"null",
        b"\xff\xfe{}",
        b"[" * 50_000,
        b'{"seed": ' + b"9" * 6_000 + b"}",
        b'{"prompt": "\\ud800", "messages": [{"role": "user", "content": "\\udfff"}]}',
        WHOLE % b'"user": "\xed\xa0\x80"',
        WHOLE % b'"unknown": NaN',
        WHOLE % b'"temperature": Infinity',
        WHOLE % b'"temperature": -Infinity',
        WHOLE % b'"user": "\\ud800"',
        WHOLE % b'"user": "\\udc00x"',
    ],
    ids=lambda body: body[:24].decode("latin-1"),
)
async def test_bodies_that_are_no_json_object(doors: Doors, path: str, body: bytes) -> None:
    error = await refused(doors, path, body)
    assert error["type"] == "invalid_request_error"
    assert "JSON" in str(error["message"])


BAD_NUMBERS = {
    "temperature": [-0.1, 1e308, 101, "1", True, 10**400],
    "top_p": [0, -1, 1.01, 1e-60],
    "top_k": [-2, 1.5, False],
    "min_p": [-0.1, 1.1],
    "repetition_penalty": [0, -1, 1e-9, 1e9],
    "presence_penalty": [-2.1, 2.1],
    "frequency_penalty": [-2.1, 2.1],
    "max_tokens": [0, -1, 1.5, "5"],
    "min_tokens": [-1, 8],
    "seed": [2**64, -(2**63) - 1, 1.5],
    "n": [0, 17, -1, True],
    "stop_token_ids": [[-1], [300], [2**31], [2**63], ["1"], 5],
    "stop": ["", [""], ["a"] * 17, [1], 5, "x" * 1025],
    "logit_bias": [
        {"300": 1},
        {"-1": 1},
        {"1": 101},
        {"1": -101},
        {"x": 1},
        {" 1": 1},
        {"1_0": 1},
        {"٣": 1},
        {"1": "a"},
        {"5": 1, "05": 1},
        [],
    ],
    "cache_salt": ["", "x" * 257, 5],
    "stream": ["yes", 1],
    "model": [5],
    "pdd": [{"report": True}, {"pipeline": "remote"}, {"handoff": "sideways"}, {"handoff_at": 1.5}, True],
}


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("field", BAD_NUMBERS)
async def test_values_out_of_range_name_their_field(doors: Doors, path: str, field: str) -> None:
    for value in BAD_NUMBERS[field]:
        answer = await doors.post(path, ask(path, **{field: value}))
        assert answer.status_code == 400, (field, value, answer.text)
        error = answer.json()["error"]
        assert field in f"{error['param']}", (value, error)
        assert error["type"] == "invalid_request_error"
    assert not doors.coordinator.requests
    assert (await doors.post(path, ask(path))).status_code == 200


@pytest.mark.parametrize("literal", ["1e999", "-1e999"])
@pytest.mark.parametrize("field", ["temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"])
async def test_numbers_beyond_every_float(doors: Doors, field: str, literal: str) -> None:
    body = b'{"model": "tiny", "prompt": "x", "%s": %s}' % (field.encode(), literal.encode())
    assert (await refused(doors, COMPLETIONS, body))["param"] == field
    await refused(doors, COMPLETIONS, b'{"model": "tiny", "prompt": "x", "logit_bias": {"5": %s}}' % literal.encode())


@pytest.mark.parametrize("token_id", [-1, 300, 2**31, 2**63, 2**64, -(2**63), 1.0, True, None])
async def test_ids_out_of_range(doors: Doors, token_id: object) -> None:
    for prompt in ([token_id], [5, token_id], [[5], [token_id]]):
        error = await refused(doors, COMPLETIONS, ask(COMPLETIONS, prompt=prompt))
        assert error["param"] == "prompt"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stop": 5}, "stop"),
        ({"stop": ["a", 5]}, "stop"),
        ({"logit_bias": {"5": "x"}}, "logit_bias.5"),
        ({"logit_bias": {"str": None}}, "logit_bias.str"),
        ({"stop_token_ids": [1, "x"]}, "stop_token_ids.1"),
        ({"pdd": {"handoff": "no"}}, "pdd.handoff"),
        ({"pdd": {"unknown": 1}}, "pdd.unknown"),
        ({"chat_template_kwargs": {"a": {}}}, "chat_template_kwargs.a"),
        ({"chat_template_kwargs": {"a": [[]]}}, "chat_template_kwargs.a"),
        ({"messages": [*MESSAGES, {"content": "x"}]}, "messages.1.role"),
    ],
)
async def test_a_field_is_named_as_the_client_names_it(doors: Doors, fields: dict[str, object], param: str) -> None:
    assert (await refused(doors, CHAT, ask(CHAT, **fields)))["param"] == param


@pytest.mark.parametrize("prompt", ["", [], [[]], [""], [[5], []], None, 5, {"a": 1}, ["a", 5], [[5], "a"]])
async def test_prompts_that_are_none(doors: Doors, prompt: object) -> None:
    assert (await refused(doors, COMPLETIONS, ask(COMPLETIONS, prompt=prompt)))["param"] == "prompt"


async def test_prompt_left_out(doors: Doors) -> None:
    assert (await refused(doors, COMPLETIONS, {"model": "tiny"}))["param"] == "prompt"
    assert (await refused(doors, CHAT, {"model": "tiny"}))["param"] == "messages"


@pytest.mark.parametrize(
    "messages",
    [
        [],
        "hello",
        [{"role": "user"}],
        [{"content": "x"}],
        [{"role": "user", "content": None}],
        [{"role": "user", "content": 5}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}],
        [{"role": "user", "content": [{"type": "text", "text": 5}]}],
        [{"role": "user", "content": ["x"]}],
        [{"role": "tool", "content": "x"}],
        [{"role": "wizard", "content": "x"}],
        [{"role": "assistant", "content": "x", "tool_calls": [{"id": "1"}]}],
    ],
    ids=str,
)
async def test_messages_that_are_none(doors: Doors, messages: object) -> None:
    assert str((await refused(doors, CHAT, ask(CHAT, messages=messages)))["param"]).startswith("messages")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tools", [{"type": "function"}]),
        ("tool_choice", "required"),
        ("functions", [{"name": "f"}]),
        ("response_format", {"type": "json_object"}),
        ("response_format", {"type": "json_schema", "json_schema": {}}),
        ("best_of", 2),
        ("best_of", True),
        ("suffix", "x"),
        ("audio", {"voice": "x"}),
        ("modalities", ["text", "audio"]),
        ("use_beam_search", True),
        ("guided_json", {}),
        ("structured_outputs", {"regex": "x"}),
        ("chat_template", "x"),
    ],
)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_what_would_change_the_answer_but_is_not_supported(doors: Doors, path: str, field: str, value: object) -> None:
    error = await refused(doors, path, ask(path, **{field: value}))
    assert error["param"] == field
    assert field in str(error["message"])


async def test_harmless_values_and_unknown_fields_are_let_through(doors: Doors) -> None:
    harmless = {
        "tools": None,
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "best_of": 1,
        "echo": False,
        "suffix": None,
        "user": "me",
        "metadata": {"host": "x"},
        "service_tier": "auto",
        "brand_new_field": 1,
    }
    for path in (CHAT, COMPLETIONS):
        assert (await doors.post(path, ask(path, **harmless))).status_code == 200


@pytest.mark.parametrize(
    "field",
    [
        "kv_transfer_params",
        "bootstrap_host",
        "bootstrap_room",
        "remote_host",
        "remote_port",
        "bridge",
        "bridge_host",
        "epoch",
        "peer",
        "host",
        "port",
    ],
)
@pytest.mark.parametrize("value", [None, {"remote_host": "10.0.0.1", "remote_port": 1}])
async def test_clients_name_no_machines(doors: Doors, field: str, value: object) -> None:
    for path in (CHAT, COMPLETIONS):
        assert (await refused(doors, path, ask(path, **{field: value})))["param"] == field


async def test_machines_inside_our_own_field_are_refused_too(doors: Doors) -> None:
    assert "pdd" in str((await refused(doors, COMPLETIONS, ask(COMPLETIONS, pdd={"bridge_host": "x"})))["param"])


async def test_unknown_model(doors: Doors) -> None:
    for path in (CHAT, COMPLETIONS):
        error = await refused(doors, path, ask(path, model="other"), 404)
        assert error["code"] == "model_not_found"
        assert error["param"] == "model"
    with pytest.raises(openai.NotFoundError):
        await doors.openai.chat.completions.create(model="other", messages=MESSAGES)


async def test_model_may_be_left_out(doors: Doors) -> None:
    assert (await doors.post(COMPLETIONS, {"prompt": "x"})).json()["model"] == "tiny"


async def test_a_model_without_a_template_names_the_field_once(doors: Doors, text: TextModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text, "_chat_template", None)
    answer = await doors.post(CHAT, ask(CHAT))
    assert answer.status_code == 400
    assert str(answer.json()["error"]["message"]).startswith("messages: this model has no chat template")


async def test_context_length_at_its_edges(text: TextModel) -> None:
    async with open_doors(ScriptedCoordinator(text, limits=Limits(max_context_tokens=48))) as doors:
        error = await refused(doors, COMPLETIONS, ask(COMPLETIONS, prompt=[5] * 48))
        assert error["code"] == "context_length_exceeded"
        assert error["param"] == "prompt"
        assert "48 tokens" in str(error["message"])
        assert (await refused(doors, COMPLETIONS, ask(COMPLETIONS, prompt=[5] * 40, max_tokens=9)))["code"] == "context_length_exceeded"
        long = [{"role": "user", "content": "word " * 50}]
        chat = await refused(doors, CHAT, ask(CHAT, messages=long))
        assert (chat["code"], chat["param"]) == ("context_length_exceeded", "messages")
        doors.coordinator.requests.clear()
        assert (await doors.post(COMPLETIONS, ask(COMPLETIONS, prompt=[5] * 40, max_tokens=8))).status_code == 200
        # Without max_tokens the default applies, but never more than fits.
        assert (await doors.post(COMPLETIONS, ask(COMPLETIONS, prompt=[5] * 47))).json()["usage"]["completion_tokens"] == 1
        assert (await doors.post(COMPLETIONS, ask(COMPLETIONS, prompt=[5] * 20))).json()["usage"]["completion_tokens"] == 7


async def test_one_bad_prompt_starts_none(doors: Doors) -> None:
    await refused(doors, COMPLETIONS, ask(COMPLETIONS, prompt=[[5], [6], [300]]))


async def test_more_choices_than_may_queue(doors: Doors) -> None:
    assert (await refused(doors, COMPLETIONS, ask(COMPLETIONS, prompt=["a"] * 33, n=2)))["param"] == "prompt"


async def test_top_logprobs_need_logprobs(doors: Doors) -> None:
    for fields in ({"top_logprobs": 1}, {"top_logprobs": 1, "logprobs": False}, {"logprobs": True, "top_logprobs": 21}, {"logprobs": 1}):
        assert "logprobs" in str((await refused(doors, CHAT, ask(CHAT, **fields)))["param"])
    for value in (-1, 21, True):
        assert (await refused(doors, COMPLETIONS, ask(COMPLETIONS, logprobs=value)))["param"] == "logprobs"


async def test_stream_options_need_a_stream(doors: Doors) -> None:
    for path in (CHAT, COMPLETIONS):
        assert (await refused(doors, path, ask(path, stream_options={"include_usage": True})))["param"] == "stream_options"


async def test_contradicting_limits(doors: Doors) -> None:
    assert (await refused(doors, CHAT, ask(CHAT, max_tokens=3, max_completion_tokens=4)))["param"] == "max_completion_tokens"
    assert (await doors.post(CHAT, ask(CHAT, max_tokens=3, max_completion_tokens=3))).json()["usage"]["completion_tokens"] == 3


async def test_body_larger_than_allowed(doors: Doors) -> None:
    limit = SERVING.max_body_bytes
    fits = json.dumps(ask(COMPLETIONS, user="")).encode()
    fits = fits.replace(b'"user": ""', b'"user": "%s"' % (b"x" * (limit - len(fits))))
    assert len(fits) == limit
    assert (await doors.post(COMPLETIONS, fits)).status_code == 200
    await refused(doors, COMPLETIONS, fits + b" ", 413)
    await refused(doors, COMPLETIONS, b"x" * (4 * 1024 * 1024), 413)

    async def parts() -> asyncio.StreamReader:
        for _ in range(3):
            yield b"x" * limit

    chunked = await doors.http.post(COMPLETIONS, content=parts())
    assert chunked.status_code == 413
    assert chunked.json()["error"]["type"] == "invalid_request_error"


async def test_a_huge_body_that_waits_for_leave_is_never_sent(doors: Doors) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", doors.http_port)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 999999999999\r\nexpect: 100-continue\r\n\r\n")
    async with asyncio.timeout(5):
        head = await reader.readuntil(b"\r\n")
    assert head.startswith(b"HTTP/1.1 413")
    writer.close()


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", ""])
async def test_a_wrong_content_type_is_tolerated(doors: Doors, content_type: str) -> None:
    assert (await doors.post(COMPLETIONS, ask(COMPLETIONS), **{"content-type": content_type})).status_code == 200


async def test_unknown_paths_and_methods_answer_in_the_same_shape(doors: Doors) -> None:
    for answer, status in ((await doors.http.get("/v1/nothing"), 404), (await doors.http.get(CHAT), 405)):
        assert answer.status_code == status
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    "override",
    [{"pipeline": "direct"}, {"pipeline": "local"}, {"handoff": "catch_up"}, {"handoff_at": 0}, {"pipeline": "relay", "handoff_at": 3}],
)
async def test_overrides_need_leave(text: TextModel, override: dict[str, object]) -> None:
    strict = SERVING.model_copy(update={"allow_override": False})
    async with open_doors(ScriptedCoordinator(text), strict) as doors:
        error = await refused(doors, COMPLETIONS, ask(COMPLETIONS, pdd=override), 403)
        assert error["type"] == "permission_error"
        assert (await doors.post(COMPLETIONS, ask(COMPLETIONS, pdd={"report_origin": True}))).status_code == 200
    async with open_doors(ScriptedCoordinator(text)) as doors:
        assert (await doors.post(COMPLETIONS, ask(COMPLETIONS, pdd=override))).status_code == 200
        given = doors.coordinator.requests[0].override
        assert {name: value for name, value in vars(given).items() if value is not None} == override


async def test_a_handoff_position_needs_a_relay(doors: Doors) -> None:
    for override in (
        {"pipeline": "direct", "handoff_at": 1},
        {"pipeline": "local", "handoff_at": 1},
        {"handoff_at": -1},
        {"handoff_at": 2**31},
    ):
        assert (await refused(doors, COMPLETIONS, ask(COMPLETIONS, pdd=override)))["param"] == "handoff_at"
