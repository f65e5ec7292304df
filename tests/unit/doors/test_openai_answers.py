"""What the OpenAI door answers, whole and streamed, through the official client and bare HTTP."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest

from pdd.serving.text.model import TextModel
from pddbridge.rpc.gen import inference_pb2
from tests.support.doors import Doors, open_doors
from tests.support.scripted_coordinator import TIMELINE, Script, ScriptedCoordinator, byte_id, expected_tokens, letter_id

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
MESSAGES = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]


def ask(path: str, **fields: object) -> dict[str, object]:
    return {"model": "tiny", "seed": 11, "max_tokens": 5, **({"messages": MESSAGES} if path == CHAT else {"prompt": "hello"}), **fields}


def texts(doors: Doors) -> list[str]:
    """What the script says to each request, in their order of arrival."""
    text = doors.coordinator.text
    requests = sorted(doors.coordinator.requests, key=lambda request: int(request.request_id.rsplit("-", 1)[1]))
    return ["".join(text.token_text(token_id) for token_id in expected_tokens(request)) for request in requests]


def choice_of(chunk: dict[str, object]) -> dict[str, object]:
    (choice,) = chunk["choices"]
    return choice


async def test_official_client_gets_a_whole_chat_answer(doors: Doors) -> None:
    answer = await doors.openai.chat.completions.create(model="tiny", messages=MESSAGES, max_completion_tokens=5, seed=11)
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content == texts(doors)[0]
    assert answer.choices[0].finish_reason == "length"
    (request,) = doors.coordinator.requests
    assert list(request.prompt_ids) == doors.coordinator.text.render_chat(MESSAGES)
    assert answer.usage.prompt_tokens == len(request.prompt_ids)
    assert answer.usage.completion_tokens == 5
    assert answer.usage.total_tokens == len(request.prompt_ids) + 5
    assert answer.usage.prompt_tokens_details.cached_tokens == TIMELINE.main_hit_tokens


async def test_official_client_streams_chat(doors: Doors) -> None:
    stream = await doors.openai.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=5, seed=11, stream=True)
    chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert not chunks[0].choices[0].delta.content
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == texts(doors)[0]
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert len({chunk.id for chunk in chunks}) == 1


async def test_official_client_completes_whole_and_streamed_alike(doors: Doors) -> None:
    whole = await doors.openai.completions.create(model="tiny", prompt="hello", max_tokens=6, seed=3)
    stream = await doors.openai.completions.create(model="tiny", prompt="hello", max_tokens=6, seed=3, stream=True)
    streamed = "".join([chunk.choices[0].text async for chunk in stream])
    assert whole.object == "text_completion"
    assert whole.choices[0].text == streamed == texts(doors)[0]
    assert whole.choices[0].finish_reason == "length"


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_stream_ends_with_a_closing_chunk_and_done(doors: Doors, path: str) -> None:
    events = await doors.events(path, ask(path))
    assert events[-1] == "[DONE]"
    assert events.count("[DONE]") == 1
    closing = choice_of(json.loads(events[-2]))
    assert closing["finish_reason"] == "length"
    assert closing.get("text", "") == ""
    assert closing.get("delta", {}) == {}
    assert all(choice_of(json.loads(data))["finish_reason"] is None for data in events[:-2])


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("options", ["absent", None, {}, {"include_usage": False}, {"include_usage": True}])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_usage_comes_once_and_only_when_asked_for(doors: Doors, path: str, options: object, n: int) -> None:
    given = {} if options == "absent" else {"stream_options": options}
    chunks = await doors.chunks(path, ask(path, n=n, **given))
    whole = (await doors.post(path, ask(path, n=n))).json()["usage"]
    assert whole["completion_tokens"] == 5 * n
    assert whole["prompt_tokens"] == len(doors.coordinator.requests[0].prompt_ids)
    assert whole["total_tokens"] == whole["prompt_tokens"] + whole["completion_tokens"]
    assert whole["prompt_tokens_details"] == {"cached_tokens": TIMELINE.main_hit_tokens}
    if options != {"include_usage": True}:
        assert all("usage" not in chunk for chunk in chunks)
        assert all(chunk["choices"] for chunk in chunks)
        return
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == whole
    assert all(chunk["usage"] is None and len(chunk["choices"]) == 1 for chunk in chunks[:-1])


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_choices_interleave_and_keep_apart(doors: Doors, path: str) -> None:
    chunks = await doors.chunks(path, ask(path, n=3, max_tokens=20))
    order = [choice_of(chunk)["index"] for chunk in chunks]
    assert set(order) == {0, 1, 2}
    assert sum(before != after for before, after in pairwise(order)) > 10, "choices were streamed one after the other"
    said = ["", "", ""]
    finished = []
    for chunk in chunks:
        choice = choice_of(chunk)
        said[choice["index"]] += choice["text"] if path == COMPLETIONS else choice["delta"].get("content", "")
        finished += [choice["index"]] if choice["finish_reason"] else []
    assert said == texts(doors)
    assert len(set(said)) == 3
    assert sorted(finished) == [0, 1, 2]
    whole = (await doors.post(path, ask(path, n=3, max_tokens=20))).json()["choices"]
    assert [choice["index"] for choice in whole] == [0, 1, 2]
    assert [choice["text"] if path == COMPLETIONS else choice["message"]["content"] for choice in whole] == said


async def test_each_choice_of_a_chat_opens_with_its_role(doors: Doors) -> None:
    chunks = await doors.chunks(CHAT, ask(CHAT, n=2))
    for index in (0, 1):
        first = next(choice_of(chunk) for chunk in chunks if choice_of(chunk)["index"] == index)
        assert first["delta"] == {"role": "assistant", "content": ""}
    assert sum("role" in choice_of(chunk)["delta"] for chunk in chunks) == 2


@pytest.mark.parametrize("prompt", [["ab", "xyz"], [[10, 11], [12, 13, 14]]])
async def test_several_prompts_index_their_choices_in_order(doors: Doors, prompt: list[object]) -> None:
    answer = (await doors.post(COMPLETIONS, ask(COMPLETIONS, prompt=prompt, n=2))).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert [choice["text"] for choice in answer["choices"]] == texts(doors)
    lengths = [len(request.prompt_ids) for request in doors.coordinator.requests]
    assert lengths[0] == lengths[1] != lengths[2] == lengths[3]
    assert answer["usage"]["prompt_tokens"] == lengths[0] + lengths[2]
    assert answer["usage"]["completion_tokens"] == 20
    alone = (await doors.post(COMPLETIONS, ask(COMPLETIONS, prompt=prompt[1], n=2))).json()
    assert [choice["text"] for choice in alone["choices"]] == [choice["text"] for choice in answer["choices"][2:]]


async def test_ids_are_taken_as_they_are_and_text_is_tokenized(doors: Doors) -> None:
    await doors.post(COMPLETIONS, ask(COMPLETIONS, prompt=[7, 299, 0]))
    await doors.post(COMPLETIONS, ask(COMPLETIONS, prompt="the end"))
    assert doors.coordinator.requests[0].prompt_ids == (7, 299, 0)
    assert list(doors.coordinator.requests[1].prompt_ids) == doors.coordinator.text.encode("the end", True)


async def test_text_parts_are_joined_and_developer_is_system(doors: Doors) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    await doors.post(CHAT, ask(CHAT, messages=[{"role": "developer", "content": "x"}, {"role": "user", "content": parts}]))
    plain = [{"role": "system", "content": "x"}, {"role": "user", "content": "one\ntwo"}]
    assert list(doors.coordinator.requests[0].prompt_ids) == doors.coordinator.text.render_chat(plain)


@pytest.mark.parametrize("top", [0, 2, 20])
async def test_chat_logprobs_whole_and_streamed(doors: Doors, top: int) -> None:
    body = ask(CHAT, logprobs=True, top_logprobs=top)
    content = (await doors.post(CHAT, body)).json()["choices"][0]["logprobs"]["content"]
    assert len(content) == 5
    assert "".join(entry["token"] for entry in content) == texts(doors)[0]
    assert [entry["logprob"] for entry in content] == [-0.5, -1.5, -2.5, -3.5, -4.5]
    assert all(bytes(entry["bytes"]).decode() == entry["token"] for entry in content)
    assert all(len(entry["top_logprobs"]) == top for entry in content)
    chunks = await doors.chunks(CHAT, body)
    streamed = [entry for chunk in chunks for entry in (choice_of(chunk)["logprobs"] or {"content": []})["content"]]
    assert streamed == content


async def test_official_client_reads_logprobs(doors: Doors) -> None:
    chat = await doors.openai.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=5, seed=1, logprobs=True, top_logprobs=3)
    assert [len(entry.top_logprobs) for entry in chat.choices[0].logprobs.content] == [3] * 5
    plain = await doors.openai.completions.create(model="tiny", prompt="hello", max_tokens=5, seed=1, logprobs=3)
    assert plain.choices[0].logprobs.tokens == list(plain.choices[0].text)
    assert plain.choices[0].logprobs.text_offset == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("num_top", [0, 3])
async def test_completion_logprobs_whole_and_streamed(doors: Doors, num_top: int) -> None:
    body = ask(COMPLETIONS, logprobs=num_top)
    found = (await doors.post(COMPLETIONS, body)).json()["choices"][0]["logprobs"]
    assert "".join(found["tokens"]) == texts(doors)[0]
    assert found["token_logprobs"] == [-0.5, -1.5, -2.5, -3.5, -4.5]
    for token, logprob, top in zip(found["tokens"], found["token_logprobs"], found["top_logprobs"], strict=True):
        assert len(top) == num_top + 1
        assert top[token] == logprob
    chunks = await doors.chunks(COMPLETIONS, body)
    parts = [choice_of(chunk)["logprobs"] for chunk in chunks if choice_of(chunk)["logprobs"]]
    assert {name: [entry for part in parts for entry in part[name]] for name in found} == found


async def test_no_logprobs_unless_asked_for(doors: Doors) -> None:
    assert (await doors.post(CHAT, ask(CHAT))).json()["choices"][0]["logprobs"] is None
    assert (await doors.post(COMPLETIONS, ask(COMPLETIONS))).json()["choices"][0]["logprobs"] is None
    assert doors.coordinator.requests[0].sampling.num_logprobs is None


async def test_a_split_character_has_its_bytes_in_logprobs_and_offsets_count_characters(text: TextModel) -> None:
    tokens = (letter_id("a"), *(byte_id(byte) for byte in "😀".encode()), letter_id("b"))
    script = Script(tokens=tokens, hold=4)
    async with open_doors(ScriptedCoordinator(text, script)) as doors:
        plain = (await doors.post(COMPLETIONS, ask(COMPLETIONS, logprobs=1, max_tokens=9))).json()["choices"][0]
        chat = (await doors.post(CHAT, ask(CHAT, logprobs=True, max_tokens=9))).json()["choices"][0]
        chunks = await doors.chunks(COMPLETIONS, ask(COMPLETIONS, logprobs=1, max_tokens=9))
    assert plain["text"] == chat["message"]["content"] == "a😀b"
    assert plain["logprobs"]["tokens"] == ["a", "bytes:\\xf0", "bytes:\\x9f", "bytes:\\x98", "bytes:\\x80", "b"]
    assert plain["logprobs"]["text_offset"] == [0, 1, 1, 1, 1, 2]
    assert [entry["bytes"] for entry in chat["logprobs"]["content"]] == [[97], [0xF0], [0x9F], [0x98], [0x80], [98]]
    # Every token has a chunk with its record, though text comes with the fourth token and the last only.
    assert [choice_of(chunk)["text"] for chunk in chunks] == ["", "", "", "a", "", "😀b", ""]
    assert [choice_of(chunk)["logprobs"]["text_offset"] for chunk in chunks[:-1]] == [[0], [1], [1], [1], [1], [2]]


async def test_impossible_tokens_have_a_finite_logprob(text: TextModel) -> None:
    async with open_doors(ScriptedCoordinator(text, Script(wide_logprobs=True))) as doors:
        answer = (await doors.post(CHAT, ask(CHAT, logprobs=True, top_logprobs=2))).json()
    assert answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"][1]["logprob"] == -9999.0


async def test_text_that_is_held_back_makes_no_empty_chunks(text: TextModel) -> None:
    async with open_doors(ScriptedCoordinator(text, Script(hold=3))) as doors:
        chunks = await doors.chunks(COMPLETIONS, ask(COMPLETIONS, max_tokens=7))
    assert [len(choice_of(chunk)["text"]) for chunk in chunks] == [3, 3, 1, 0]


async def test_line_separators_in_text_do_not_break_events(text: TextModel) -> None:
    said = "a\u2028b\nc\x85"
    script = Script(tokens=tuple(byte_id(byte) for byte in said.encode()))
    async with open_doors(ScriptedCoordinator(text, script)) as doors:
        stream = await doors.openai.completions.create(model="tiny", prompt="x", max_tokens=50, stream=True)
        assert "".join([chunk.choices[0].text async for chunk in stream]) == said
        async with doors.http.stream("POST", COMPLETIONS, json=ask(COMPLETIONS, max_tokens=50, stream=True)) as answer:
            lines = [line async for line in answer.aiter_lines() if line]
    assert all(line.startswith("data: ") for line in lines)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_origins_and_timeline_on_request(doors: Doors, path: str) -> None:
    body = ask(path, pdd={"report_origin": True, "timeline": True})
    chunks = await doors.chunks(path, body)
    said = [choice_of(chunk)["pdd"] for chunk in chunks if "pdd" in choice_of(chunk)]
    assert [part["origin"] for part in said] == ["relay", "relay", "main", "main", "main"]
    assert [token_id for part in said for token_id in part["token_ids"]] == list(expected_tokens(doors.coordinator.requests[0]))
    timelines = [chunk["pdd"]["timeline"] for chunk in chunks if "pdd" in chunk]
    assert len(timelines) == 1
    assert "pdd" in chunks[-1]
    assert timelines[0]["main_hit_tokens"] == 5
    assert timelines[0]["pipeline_reason"] == "scripted"
    assert timelines[0].keys() == {field.name for field in inference_pb2.Timeline.DESCRIPTOR.fields}
    whole = (await doors.post(path, body)).json()
    assert whole["pdd"] == {"timeline": timelines[0]}
    ours = whole["choices"][0]["pdd"]
    assert ours["origins"] == [["relay", 2], ["main", 3]]
    assert ours["token_ids"] == list(expected_tokens(doors.coordinator.requests[0]))


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_nothing_of_ours_without_request(doors: Doors, path: str) -> None:
    whole = await doors.post(path, ask(path))
    assert "pdd" not in whole.text
    assert all("pdd" not in data for data in await doors.events(path, ask(path)))


async def test_models(doors: Doors) -> None:
    models = await doors.openai.models.list()
    assert [model.id for model in models.data] == ["tiny"]
    assert (await doors.openai.models.retrieve("tiny")).max_model_len == 512
    missing = await doors.http.get("/v1/models/other/name")
    assert missing.status_code == 404
    assert missing.json()["error"]["code"] == "model_not_found"


async def test_health_follows_the_workers(doors: Doors) -> None:
    assert (await doors.http.get("/health")).status_code == 200
    doors.unhealthy.append("main-0")
    sick = await doors.http.get("/health")
    assert sick.status_code == 503
    assert sick.json()["unhealthy_workers"] == ["main-0"]


async def test_metrics_and_version(doors: Doors) -> None:
    metrics = await doors.http.get("/metrics")
    assert "pdd:num_requests_running" in metrics.text
    assert metrics.headers["content-type"].startswith("text/plain")
    assert (await doors.http.get("/version")).json()["version"].count(".") >= 1
