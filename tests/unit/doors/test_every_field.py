"""Every field of OpenAI's and vLLM's request schemas changes the answer, is refused by name, or is said to have no bearing on it.

docs/sampling.md is the table; this holds the service to it. OpenAI's fields are read from its package, vLLM's are those of its published
protocol (vllm/entrypoints/openai: completion/protocol.py and chat_completion/protocol.py).
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
import pytest_asyncio
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params
from tokenizers import Tokenizer

from pdd.serving.text.gguf_tokenizer import set_bos_eos
from pdd.serving.text.model import TextModel
from tests.support.doors import Doors, open_doors
from tests.support.sampling_coordinator import SamplingCoordinator
from tests.support.tiny_models import make_tiny_llama

PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
VLLM = [
    "use_beam_search",
    "top_k",
    "min_p",
    "repetition_penalty",
    "watermarking",
    "length_penalty",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "min_tokens",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "truncate_prompt_tokens",
    "truncation_side",
    "allowed_token_ids",
    "prompt_logprobs",
    "logprob_token_ids",
    "bad_words",
    "add_special_tokens",
    "response_format",
    "structured_outputs",
    "priority",
    "request_id",
    "session_id",
    "return_tokens_as_token_ids",
    "return_token_ids",
    "cache_salt",
    "kv_transfer_params",
    "ec_transfer_params",
    "vllm_xargs",
    "repetition_detection",
    "thinking_token_budget",
    "stream_interval",
    "echo",
]
VLLM_OF = {
    "completions": ["prompt_embeds", "best_of", "suffix", "return_token_offsets", "return_mm_kwargs", "routed_experts_prompt_start"],
    "chat": [
        "include_reasoning",
        "add_generation_prompt",
        "continue_final_message",
        "documents",
        "chat_template",
        "chat_template_kwargs",
        "media_io_kwargs",
        "mm_processor_kwargs",
        "reasoning_effort",
        "return_prompt_text",
    ],
}
OPENAI = {
    "completions": completion_create_params.CompletionCreateParamsBase.__annotations__,
    "chat": chat_create_params.CompletionCreateParamsBase.__annotations__,
}
BASE: dict[str, dict[str, object]] = {
    "completions": {"prompt": "hello there", "seed": 3, "max_tokens": 12, "ignore_eos": True},
    "chat": {"messages": [{"role": "user", "content": "hello there"}], "seed": 3, "max_tokens": 12, "ignore_eos": True},
}
# Field -> (value, what is asked for besides, in both calls that are compared).
CHANGES: dict[str, tuple[object, dict[str, object]]] = {
    "add_generation_prompt": (False, {}),
    "add_special_tokens": (None, {}),  # the other than its default, set below
    "allowed_token_ids": ([60, 70, 80], {}),
    "bad_words": (None, {"allowed_token_ids": [60, 70]}),  # set below
    "chat_template_kwargs": ({"mood": "sad"}, {}),
    "continue_final_message": (True, {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "well"}]}),
    "echo": (True, {}),
    "frequency_penalty": (2.0, {"allowed_token_ids": [60, 61, 62]}),
    "ignore_eos": (False, {"logit_bias": {"2": 100}}),
    "include_stop_str_in_output": (True, {"allowed_token_ids": [130, 131], "stop": ["\x3d", "a", "b", "c"], "stop_token_ids": [130]}),
    "logit_bias": ({"77": 100}, {}),
    "logprob_token_ids": ([5, 6], {"logprobs": True}),
    "logprobs": (True, {}),
    "max_completion_tokens": (5, {"max_tokens": None}),
    "max_tokens": (5, {}),
    "messages": ([{"role": "user", "content": "other"}], {}),
    "min_p": (0.9, {}),
    "min_tokens": (6, {"logit_bias": {"2": 100}, "ignore_eos": False}),
    "n": (2, {}),
    "presence_penalty": (2.0, {"allowed_token_ids": list(range(60, 72))}),
    "prompt": ("other", {}),
    "prompt_logprobs": (1, {}),
    "repetition_penalty": (50.0, {"allowed_token_ids": [60, 61, 62]}),
    "seed": (4, {}),
    "skip_special_tokens": (False, {"logit_bias": {"2": 100}, "ignore_eos": True}),
    "stop": (None, {}),  # set below
    "stop_token_ids": ([60], {"allowed_token_ids": [60, 61]}),
    "stream": (True, {}),
    "stream_options": ({"include_usage": True}, {"stream": True}),
    "temperature": (0, {}),
    "top_k": (1, {}),
    "top_logprobs": (3, {"logprobs": True}),
    "top_p": (0.05, {}),
    "truncate_prompt_tokens": (2, {}),
    "truncation_side": ("right", {"truncate_prompt_tokens": 2}),
}
REFUSED: dict[str, object] = {
    "audio": {"voice": "x"},
    "best_of": 3,
    "chat_template": "{{ messages }}",
    "documents": [{"title": "t", "text": "x"}],
    "ec_transfer_params": {"a": 1},
    "function_call": {"name": "f"},
    "functions": [{"name": "f"}],
    "kv_transfer_params": {"a": 1},
    "length_penalty": 2.0,
    "media_io_kwargs": {"image": {}},
    "mm_processor_kwargs": {"a": 1},
    "modalities": ["audio"],
    "moderation": {"model": "x"},
    "priority": 1,
    "prompt_embeds": "AAAA",
    "reasoning_effort": "low",
    "repetition_detection": {"max_pattern_size": 4},
    "response_format": {"type": "json_object"},
    "return_prompt_text": True,
    "return_token_ids": True,
    "return_tokens_as_token_ids": True,
    "spaces_between_special_tokens": False,
    "structured_outputs": {"regex": "a"},
    "suffix": "x",
    "thinking_token_budget": 5,
    "tool_choice": "required",
    "tools": [{"type": "function", "function": {"name": "f"}}],
    "use_beam_search": True,
    "verbosity": "low",
    "vllm_xargs": {"a": 1},
    "watermarking": True,
    "web_search_options": {},
}
NO_BEARING: dict[str, object] = {
    "cache_salt": "s",
    "include_reasoning": False,
    "metadata": {"a": "b"},
    "parallel_tool_calls": False,
    "prediction": {"type": "content", "content": "x"},
    "prompt_cache_key": "k",
    "prompt_cache_options": {"a": 1},
    "prompt_cache_retention": "24h",
    "request_id": "r",
    "return_mm_kwargs": False,
    "return_token_offsets": True,
    "routed_experts_prompt_start": 1,
    "safety_identifier": "s",
    "service_tier": "flex",
    "session_id": "s",
    "store": True,
    "stream_interval": 4,
    "user": "u",
}


def table() -> dict[str, tuple[str, str]]:
    """Field -> (endpoint, what it does here)."""
    text = (Path(__file__).parents[3] / "docs" / "sampling.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| (both|chat|completions) \| (changes|refused|no bearing) \|", text, re.MULTILINE)
    assert len({name for name, _, _ in rows}) == len(rows)
    return {name: (endpoint, does) for name, endpoint, does in rows}


TABLE = table()
CASES = [(name, path) for name, (where, _) in TABLE.items() for path in PATHS if where in ("both", path)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def sampling(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[Doors, None]:
    """Over a model whose chat template reads a variable of the client's, and whose tokenizer puts a special token before a text."""
    model_dir = make_tiny_llama(tmp_path_factory.mktemp("fields") / "tiny", num_layers=1)
    config = json.loads((model_dir / "tokenizer_config.json").read_text())
    config["chat_template"] = "{{ mood }}" + config["chat_template"]
    (model_dir / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    set_bos_eos(tokenizer, tokenizer.id_to_token(1), None)
    tokenizer.save(str(model_dir / "tokenizer.json"))
    async with open_doors(SamplingCoordinator(TextModel.load(model_dir))) as opened:
        yield opened


def test_the_table_has_every_field_of_both_schemas() -> None:
    for endpoint in PATHS:
        fields = {*OPENAI[endpoint], *VLLM, *VLLM_OF[endpoint]}
        assert not {name for name in fields if name not in TABLE}
    assert {name for name, (_, does) in TABLE.items() if does == "changes"} == set(CHANGES)
    assert {name for name, (_, does) in TABLE.items() if does == "refused"} == set(REFUSED)
    assert {name for name, (_, does) in TABLE.items() if does == "no bearing"} == {*NO_BEARING, "model"}


async def answer(doors: Doors, endpoint: str, body: dict[str, object]) -> tuple[object, ...]:
    """All that a client may look at, but for id and time."""
    response = await doors.post(PATHS[endpoint], {name: value for name, value in body.items() if value is not None})
    assert response.status_code == 200, response.text
    return re.sub(r'"(id|created)":("[^"]*"|\d+),?', "", response.text), response.headers["content-type"]


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(("name", "endpoint"), [case for case in CASES if TABLE[case[0]][1] == "changes"])
async def test_a_field_changes_the_answer(sampling: Doors, name: str, endpoint: str) -> None:
    value, besides = CHANGES[name]
    text = sampling.coordinator.text
    if name == "add_special_tokens":
        value = endpoint == "chat"
    if name == "bad_words":
        value = [text.token_text(60), text.token_text(70)]
        besides = {"allowed_token_ids": [60, 70, 71]}
    if name == "stop":
        whole = await sampling.post(PATHS[endpoint], BASE[endpoint])
        (choice,) = whole.json()["choices"]
        value = next(c for c in (choice.get("text") or choice["message"]["content"])[1:] if c.isprintable() and c != "\ufffd")
    if name in ("logprobs", "logprob_token_ids") and endpoint == "completions":
        besides = {key: 2 if key == "logprobs" else value for key, value in besides.items()}
        value = 2 if name == "logprobs" else value
    body = {**BASE[endpoint], **besides}
    plain = {key: value for key, value in body.items() if key != name or name in ("seed", "max_tokens", "messages", "prompt", "ignore_eos")}
    assert await answer(sampling, endpoint, {**body, name: value}) != await answer(sampling, endpoint, plain)
    assert await answer(sampling, endpoint, {**body, name: value}) == await answer(sampling, endpoint, {**body, name: value})


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(("name", "endpoint"), [case for case in CASES if TABLE[case[0]][1] == "refused"])
async def test_a_field_is_refused_by_name(sampling: Doors, name: str, endpoint: str) -> None:
    response = await sampling.post(PATHS[endpoint], {**BASE[endpoint], name: REFUSED[name]})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == name
    assert name in response.json()["error"]["message"]


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(("name", "endpoint"), [case for case in CASES if case[0] in NO_BEARING])
async def test_a_field_without_bearing_changes_nothing(sampling: Doors, name: str, endpoint: str) -> None:
    with_field = await answer(sampling, endpoint, {**BASE[endpoint], name: NO_BEARING[name]})
    assert with_field == await answer(sampling, endpoint, BASE[endpoint])


@pytest.mark.asyncio(loop_scope="module")
async def test_fields_of_the_other_endpoint_are_refused_where_they_would_mislead(sampling: Doors) -> None:
    for endpoint, name, value in (
        ("chat", "echo", True),
        ("chat", "best_of", 2),
        ("chat", "suffix", "x"),
        ("completions", "top_logprobs", 2),
        ("completions", "max_completion_tokens", 3),
        ("completions", "continue_final_message", True),
        ("completions", "chat_template_kwargs", {"a": 1}),
    ):
        response = await sampling.post(PATHS[endpoint], {**BASE[endpoint], name: value})
        assert (response.status_code, response.json()["error"]["param"]) == (400, name)


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("stream", [False, True])
async def test_an_echo_is_the_prompt_and_then_the_answer_with_the_log_probabilities_of_both(sampling: Doors, stream: bool) -> None:
    body = {**BASE["completions"], "logprobs": 2, "n": 2}
    plain = (await sampling.post("/v1/completions", body)).json()["choices"]
    if stream:
        choices: list[dict[str, object]] = [{"text": "", "logprobs": {}} for _ in plain]
        for chunk in await sampling.chunks("/v1/completions", {**body, "echo": True}):
            for part in chunk["choices"]:
                whole = choices[part["index"]]
                whole["text"] += part["text"]
                for key, values in (part["logprobs"] or {}).items():
                    whole["logprobs"].setdefault(key, []).extend(values)
    else:
        choices = (await sampling.post("/v1/completions", {**body, "echo": True})).json()["choices"]
    for choice, without in zip(choices, plain, strict=True):
        assert choice["text"] == "hello there" + without["text"]
        found, answered = choice["logprobs"], without["logprobs"]
        num_prompt = len(found["tokens"]) - len(answered["tokens"])
        assert num_prompt == len(sampling.coordinator.requests[-1].prompt_ids)
        assert found["token_logprobs"][0] is None
        assert found["top_logprobs"][0] is None
        assert all(value < 0 for value in found["token_logprobs"][1:])
        assert found["tokens"][num_prompt:] == answered["tokens"]
        assert found["text_offset"][num_prompt:] == [len("hello there") + offset for offset in answered["text_offset"]]
        assert "".join(found["tokens"][1:num_prompt]) == "hello there"


@pytest.mark.asyncio(loop_scope="module")
async def test_no_tokens_but_the_prompt(sampling: Doors) -> None:
    body = {**BASE["completions"], "max_tokens": 0}
    answer = (await sampling.post("/v1/completions", {**body, "echo": True, "logprobs": 1})).json()
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"], answer["usage"]["completion_tokens"]) == ("hello there", "length", 0)
    assert len(choice["logprobs"]["tokens"]) == answer["usage"]["prompt_tokens"]
    refused = await sampling.post("/v1/completions", body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "max_tokens")


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("endpoint", list(PATHS))
async def test_prompt_logprobs_have_the_shape_of_vllm(sampling: Doors, endpoint: str) -> None:
    answer = (await sampling.post(PATHS[endpoint], {**BASE[endpoint], "prompt_logprobs": 2, "n": 2})).json()
    ids = sampling.coordinator.requests[-1].prompt_ids
    shown = [answer["prompt_logprobs"]] if endpoint == "chat" else [choice["prompt_logprobs"] for choice in answer["choices"]]
    for entries in shown:
        assert entries[0] is None
        assert len(entries) == len(ids)
        for token_id, entry in zip(ids[1:], entries[1:], strict=True):
            assert set(entry[str(token_id)]) == {"logprob", "rank", "decoded_token"}
            assert sorted(e["rank"] for e in entry.values() if e["rank"]) == [1, 2]
    refused = await sampling.post(PATHS[endpoint], {**BASE[endpoint], "prompt_logprobs": 2, "stream": True})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "prompt_logprobs")
