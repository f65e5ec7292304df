"""From a validated body to a Call: the wish for ``admission_check`` and how the answer is to be shaped. Pure."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from pdd.errors import Code, PddError
from pdd.serving.admission_check import ChatPrompt, IdsPrompt, Prompt, TextPrompt, Truncation, Wish, new_call_id
from pdd.serving.openai.schemas import ChatRequest, CompletionRequest, Message, PddOptions, SharedFields
from pdd.serving.request import Override
from pdd.serving.sampling_check import SamplingWish, refuse
from pdd.serving.text.template import ChatOptions

_TOKEN_ID = re.compile(r"[0-9]{1,10}", re.ASCII)


@dataclass(frozen=True)
class Call:
    """One HTTP call. ``created_s``: Unix time. ``want_logprobs``: the client asked for records, be it only of chosen tokens. ``echo``: the
    prompt is part of the text. ``prompt_logprobs``: as vLLM has them, beside the choice.
    """

    wish: Wish
    created_s: int
    stream: bool
    include_usage: bool
    want_logprobs: bool
    echo: bool
    prompt_logprobs: int | None
    report_origin: bool
    report_timeline: bool


def chat_call(request: ChatRequest) -> Call:
    """Raises PddError(INVALID_ARGUMENT) naming the field."""
    if request.top_logprobs is not None and not request.logprobs:
        raise refuse("top_logprobs", request.top_logprobs, "only together with logprobs=true")
    if request.max_completion_tokens is not None and request.max_tokens not in (None, request.max_completion_tokens):
        raise refuse("max_completion_tokens", request.max_completion_tokens, "the same as max_tokens, its older name, or only one of them")
    messages = tuple((message.role, message_text(f"messages[{i}]", message)) for i, message in enumerate(request.messages))
    num_logprobs = (request.top_logprobs or 0) if request.logprobs else None
    max_tokens = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
    if request.continue_final_message and request.add_generation_prompt:
        raise refuse("continue_final_message", True, "not together with add_generation_prompt=true")
    options = ChatOptions(
        add_generation_prompt=request.add_generation_prompt is not False,
        continue_final_message=bool(request.continue_final_message),
        variables=tuple(_template_variables(request.chat_template_kwargs or {}).items()),
        add_special=bool(request.add_special_tokens),
    )
    return _call("chatcmpl", "messages", (ChatPrompt(messages, options),), request, max_tokens, num_logprobs)


def completion_call(request: CompletionRequest) -> Call:
    """Raises PddError(INVALID_ARGUMENT) naming the field."""
    if request.best_of not in (None, request.n or 1):
        raise refuse("best_of", request.best_of, "the same as n: choices are not ranked here")
    prompts = completion_prompts(request.prompt)
    if request.add_special_tokens is False:
        prompts = tuple(replace(prompt, add_special=False) if isinstance(prompt, TextPrompt) else prompt for prompt in prompts)
    return _call("cmpl", "prompt", prompts, request, request.max_tokens, request.logprobs, bool(request.echo))


def message_text(where: str, message: Message) -> str:
    """The text of one message; its text parts joined by newlines, as vLLM does for templates that take strings."""
    if message.tool_calls or message.function_call:
        raise PddError(Code.INVALID_ARGUMENT, f"{where}: tool calls are not supported by this service", where)
    content = message.content
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise refuse(f"{where}.content", content, "a string or a list of text parts")
    texts: list[str] = []
    for number, part in enumerate(content):
        kind, text = (part.get("type"), part.get("text")) if isinstance(part, dict) else (None, None)
        if kind != "text" or not isinstance(text, str):
            raise refuse(f"{where}.content[{number}]", part if kind in (None, "text") else kind, 'only {"type": "text", "text": "..."}')
        texts.append(text)
    return "\n".join(texts)


def completion_prompts(given: object) -> tuple[Prompt, ...]:
    """The four forms of OpenAI's ``prompt``. Ranges of ids are checked later, with the model's vocabulary."""
    if isinstance(given, str):
        return (TextPrompt(given),)
    if isinstance(given, list):
        if not given:
            raise refuse("prompt", given, "at least one token or one prompt")
        if all(isinstance(item, str) for item in given):
            return tuple(TextPrompt(item) for item in given)
        if all(_is_int(item) for item in given):
            return (IdsPrompt(tuple(given)),)
        if all(isinstance(item, list) and all(_is_int(token_id) for token_id in item) for item in given):
            return tuple(IdsPrompt(tuple(item)) for item in given)
    raise refuse("prompt", given, "a string, a list of strings, a list of token ids or a list of lists of token ids")


def _call(
    id_prefix: str,
    field: str,
    prompts: tuple[Prompt, ...],
    request: SharedFields,
    max_tokens: int | None,
    num_logprobs: int | None,
    echo: bool = False,
) -> Call:
    if request.stream_options is not None and not request.stream:
        raise PddError(Code.INVALID_ARGUMENT, "stream_options: only allowed with stream=true", "stream_options")
    if request.prompt_logprobs is not None and request.stream:
        raise refuse("prompt_logprobs", request.prompt_logprobs, "only without stream")
    options = request.pdd or PddOptions()
    prompt_only = echo and max_tokens == 0
    scored = [count for count in (request.prompt_logprobs, num_logprobs if echo else None) if count is not None]
    wish = Wish(
        call_id=new_call_id(id_prefix),
        field=field,
        model=request.model,
        prompts=prompts,
        sampling=_sampling(request, 1 if prompt_only else max_tokens, num_logprobs),
        num_choices=request.n or 1,
        seed=None if request.seed == -1 else request.seed,  # vLLM: -1 asks for a random one
        stop_strings=_stop_strings(request.stop),
        cache_salt=request.cache_salt,
        override=Override(options.pipeline, options.handoff, options.handoff_at),
        truncation=_truncation(request),
        bad_words=tuple(request.bad_words or ()),
        with_special=request.skip_special_tokens is False,
        include_stop=bool(request.include_stop_str_in_output),
        prompt_logprobs=max(scored, default=None),
        prompt_only=prompt_only,
        score_every_choice=bool(request.stream),
    )
    return Call(
        wish=wish,
        created_s=int(time.time()),
        stream=bool(request.stream),
        include_usage=request.stream_options is not None and bool(request.stream_options.include_usage),
        want_logprobs=num_logprobs is not None,
        echo=echo,
        prompt_logprobs=request.prompt_logprobs,
        report_origin=options.report_origin,
        report_timeline=options.timeline,
    )


def _sampling(request: SharedFields, max_tokens: int | None, num_logprobs: int | None) -> SamplingWish:
    return SamplingWish(
        max_tokens=max_tokens,
        min_tokens=request.min_tokens,
        temperature=request.temperature,
        top_k=request.top_k,
        top_p=request.top_p,
        min_p=request.min_p,
        repetition_penalty=request.repetition_penalty,
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
        logit_bias=tuple((_token_id(key), bias) for key, bias in (request.logit_bias or {}).items()),
        stop_token_ids=tuple(request.stop_token_ids or ()),
        ignore_eos=bool(request.ignore_eos),
        num_logprobs=num_logprobs,
        allowed_token_ids=tuple(request.allowed_token_ids or ()),
        logprob_token_ids=tuple(request.logprob_token_ids or ()),
    )


def _truncation(request: SharedFields) -> Truncation | None:
    tokens = request.truncate_prompt_tokens
    if tokens is None:
        if request.truncation_side is not None:
            raise refuse("truncation_side", request.truncation_side, "only together with truncate_prompt_tokens")
        return None
    if tokens < 1 and tokens != -1:
        raise refuse("truncate_prompt_tokens", tokens, "at least 1, or -1 for as many as leave room for the output")
    return Truncation(None if tokens == -1 else tokens, keep_end=request.truncation_side != "right")


def _template_variables(given: Mapping[str, object]) -> dict[str, object]:
    for name in given:
        if not name.isidentifier() or name.startswith("_"):
            raise refuse("chat_template_kwargs", name, "names of template variables")
    return dict(given)


def _stop_strings(given: str | Sequence[str] | None) -> tuple[str, ...]:
    if given is None:
        return ()
    return (given,) if isinstance(given, str) else tuple(given)


def _token_id(key: str) -> int:
    """int() would also take " 5", "1_0" and digits of other scripts."""
    if not _TOKEN_ID.fullmatch(key):
        raise refuse("logit_bias", key, "keys that are token ids in decimal digits")
    return int(key)


def _is_int(item: object) -> bool:
    return isinstance(item, int) and not isinstance(item, bool)
