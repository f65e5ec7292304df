"""The one place where a client's wish, whichever door it came through, becomes a GenerationRequest. Outside input is checked here."""

from __future__ import annotations

import asyncio
import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from pdd.errors import Code, PddError
from pdd.serving.front import Front
from pdd.serving.request import GenerationRequest, Override
from pdd.serving.sampling_check import (
    MAX_LOGPROBS,
    SamplingBounds,
    SamplingWish,
    check_token_ids,
    choice_seed,
    refuse,
    sampling_params,
    unsigned_seed,
)
from pdd.serving.text.template import PLAIN_CHAT, ChatOptions

MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 1024
MAX_SALT_CHARACTERS = 256
MAX_BAD_WORDS = 256
MAX_MESSAGES = 4096
MAX_HANDOFF_AT = 2**31 - 1
# "developer" is OpenAI's newer name of "system"; chat templates of open models know only the older one.
TEMPLATE_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
NO_OVERRIDE = Override()
TENANT = "default"  # everybody's, where no API keys are asked for


class UnknownModelError(PddError):
    """The model a client named is not served here."""

    def __init__(self, given: str, served: str) -> None:
        super().__init__(Code.NOT_FOUND, f"model: given {given!r}, served is {served!r}", "model")


class ContextLengthError(PddError):
    """Prompt plus output do not fit the smallest worker that would hold them."""

    def __init__(self, field: str, max_context_tokens: int, prompt_tokens: int, max_tokens: int) -> None:
        super().__init__(
            Code.INVALID_ARGUMENT,
            f"This model's maximum context length is {max_context_tokens} tokens. However, you requested {prompt_tokens + max_tokens}"
            f" tokens ({prompt_tokens} in the prompt, {max_tokens} in the completion).",
            field,
        )


@dataclass(frozen=True)
class TextPrompt:
    """Tokenized as it is; ``add_special``: the model's special tokens added."""

    text: str
    add_special: bool = True


@dataclass(frozen=True)
class IdsPrompt:
    ids: tuple[int, ...]


@dataclass(frozen=True)
class ChatPrompt:
    """``messages``: (role, content), through the model's chat template."""

    messages: tuple[tuple[str, str], ...]
    options: ChatOptions = PLAIN_CHAT


@dataclass(frozen=True)
class Truncation:
    """Keep ``tokens`` of a longer prompt, None for as many as leave room for the output: its end, or its beginning."""

    tokens: int | None
    keep_end: bool = True


Prompt = TextPrompt | IdsPrompt | ChatPrompt


@dataclass(frozen=True)
class Wish:
    """What one call asks for, before checks; one request results per prompt and choice. ``field``: public name of the prompt's field ·
    ``prompt_only``: nothing is generated · ``score_every_choice``: not only the first choice of a prompt has ``prompt_logprobs``.
    """

    call_id: str
    field: str
    model: str | None
    prompts: tuple[Prompt, ...]
    sampling: SamplingWish
    num_choices: int = 1
    seed: int | None = None
    stop_strings: tuple[str, ...] = ()
    want_text: bool = True
    cache_salt: str | None = None
    timeout_s: float | None = None
    override: Override = NO_OVERRIDE
    truncation: Truncation | None = None
    bad_words: tuple[str, ...] = ()
    with_special: bool = False
    include_stop: bool = False
    prompt_logprobs: int | None = None
    prompt_only: bool = False
    score_every_choice: bool = False


async def admit(wish: Wish, front: Front, tenant: str = TENANT) -> tuple[GenerationRequest, ...]:
    """Requests in choice order: all choices of the first prompt, then of the second. Raises PddError naming the field. ``tenant``: of the
    client's key; a salt divides its caches further, and reaches no other tenant's.

    Choice i of every prompt has ``choice_seed(seed, i)``, so a prompt's answer does not depend on its neighbours in the call; without a
    seed each prompt gets one from the operating system. Tokenizing runs in a thread: a long prompt does not hold up other streams.
    """
    check_model(wish.model, front)
    num_requests = len(wish.prompts) * wish.num_choices
    if not wish.prompts:
        raise refuse(wish.field, [], "at least one prompt")
    if num_requests > front.serving.max_queued_requests:
        raise refuse(wish.field, num_requests, f"prompts x n up to {front.serving.max_queued_requests}")
    _check_stop_strings(wish)
    _check_override(wish.override, front.serving.allow_override)
    timeout_s = _timeout_s(wish.timeout_s, front.serving.request_timeout_s)
    namespace = _namespace(tenant, wish.cache_salt)
    bad_words = _bad_words(wish.bad_words, front)
    if wish.prompt_logprobs is not None and not 0 <= wish.prompt_logprobs <= MAX_LOGPROBS:
        raise refuse("prompt_logprobs", wish.prompt_logprobs, f"0 to {MAX_LOGPROBS}")
    seed = None if wish.seed is None else unsigned_seed(wish.seed)
    requests: list[GenerationRequest] = []
    for prompt in wish.prompts:
        prompt_ids = await asyncio.to_thread(_prompt_ids, prompt, wish, front)
        bounds = _bounds(prompt_ids, wish, front)
        prompt_seed = secrets.randbits(64) if seed is None else seed
        for choice in range(wish.num_choices):
            requests.append(
                GenerationRequest(
                    request_id=f"{wish.call_id}-{len(requests)}",
                    tenant=namespace,
                    prompt_ids=prompt_ids,
                    sampling=sampling_params(replace(wish.sampling, bad_words=bad_words), choice_seed(prompt_seed, choice), bounds),
                    stop_strings=wish.stop_strings,
                    want_text=wish.want_text,
                    timeout_s=timeout_s,
                    override=wish.override,
                    prompt_logprobs=wish.prompt_logprobs if choice == 0 or wish.score_every_choice else None,
                    prompt_only=wish.prompt_only,
                    with_special=wish.with_special,
                    include_stop=wish.include_stop,
                )
            )
    return tuple(requests)


def new_call_id(prefix: str) -> str:
    """Unique, made here once per call; a client's own id is only echoed."""
    return f"{prefix}-{secrets.token_hex(16)}"


def check_model(given: str | None, front: Front) -> None:
    """None or empty means the model that is served. Raises UnknownModelError."""
    served = front.generator.limits.model_name
    if given and given != served:
        raise UnknownModelError(given, served)


def check_text(field: str, text: str) -> None:
    """Raises PddError when ``text`` is no Unicode text: a lone surrogate has no UTF-8 form."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise refuse(field, text[error.start : error.end], "Unicode text without lone surrogates") from error


def _prompt_ids(prompt: Prompt, wish: Wish, front: Front) -> tuple[int, ...]:
    field, limits = wish.field, front.generator.limits
    if isinstance(prompt, TextPrompt):
        check_text(field, prompt.text)
        ids: Sequence[int] = front.text.encode(prompt.text, prompt.add_special) if prompt.text else ()
    elif isinstance(prompt, ChatPrompt):
        if len(prompt.messages) > MAX_MESSAGES:
            raise refuse(field, f"{len(prompt.messages)} messages", f"at most {MAX_MESSAGES}")
        messages = [_message(f"{field}[{number}]", role, content) for number, (role, content) in enumerate(prompt.messages)]
        try:
            ids = front.text.render_chat(messages, prompt.options) if messages else ()
        except ValueError as error:
            raise PddError(Code.INVALID_ARGUMENT, f"{field}: {str(error).removeprefix(f'{field}: ')}", field) from error
    else:
        ids = prompt.ids
    if not ids:
        raise refuse(field, "an empty prompt", "at least one token")
    if wish.truncation is not None:
        ids = _truncated(ids, wish.truncation, limits.max_context_tokens - (wish.sampling.max_tokens or 1))
    if len(ids) >= limits.max_context_tokens:
        raise ContextLengthError(field, limits.max_context_tokens, len(ids), 1)
    check_token_ids(field, ids, limits.vocab_size)
    return tuple(ids)


def _truncated(ids: Sequence[int], truncation: Truncation, room_tokens: int) -> Sequence[int]:
    tokens = room_tokens if truncation.tokens is None else truncation.tokens
    if tokens < 1:
        raise refuse("truncate_prompt_tokens", truncation.tokens, "at least 1, or -1 for as many as leave room for the output")
    return ids[-tokens:] if truncation.keep_end else ids[:tokens]


def _bad_words(words: Sequence[str], front: Front) -> tuple[tuple[int, ...], ...]:
    """The ids of each word at the start of a text and after a space."""
    if len(words) > MAX_BAD_WORDS:
        raise refuse("bad_words", len(words), f"at most {MAX_BAD_WORDS}")
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        check_text("bad_words", word)
        if not 1 <= len(word) <= MAX_STOP_CHARACTERS:
            raise refuse("bad_words", word, f"strings of 1 to {MAX_STOP_CHARACTERS} characters")
        for form in (word.lstrip(" "), " " + word.lstrip(" ")):
            ids = tuple(front.text.encode(form, False))
            check_token_ids("bad_words", ids, front.generator.limits.vocab_size)
            if ids:
                found[ids] = None
    return tuple(found)


def _message(where: str, role: str, content: str) -> Mapping[str, str]:
    if role not in TEMPLATE_ROLES:
        raise refuse(f"{where}.role", role, f"one of {list(TEMPLATE_ROLES)}")
    check_text(f"{where}.content", content)
    return {"role": TEMPLATE_ROLES[role], "content": content}


def _bounds(prompt_ids: tuple[int, ...], wish: Wish, front: Front) -> SamplingBounds:
    limits = front.generator.limits
    room_tokens = limits.max_context_tokens - len(prompt_ids)
    max_tokens = wish.sampling.max_tokens
    if max_tokens is not None and max_tokens > room_tokens:
        raise ContextLengthError(wish.field, limits.max_context_tokens, len(prompt_ids), max_tokens)
    return SamplingBounds(limits.vocab_size, frozenset(front.text.eos_token_ids), room_tokens, front.serving.default_max_tokens)


def _check_stop_strings(wish: Wish) -> None:
    if len(wish.stop_strings) > MAX_STOP_STRINGS:
        raise refuse("stop", len(wish.stop_strings), f"at most {MAX_STOP_STRINGS} strings")
    if wish.stop_strings and not wish.want_text:
        raise refuse("stop", wish.stop_strings, "nothing: no text is made of a request for tokens only")
    for text in wish.stop_strings:
        if not 1 <= len(text) <= MAX_STOP_CHARACTERS:
            raise refuse("stop", text, f"strings of 1 to {MAX_STOP_CHARACTERS} characters")
        check_text("stop", text)


def _check_override(override: Override, allowed: bool) -> None:
    if override != NO_OVERRIDE and not allowed:
        raise PddError(Code.PERMISSION_DENIED, "pipeline and handoff are decided by the service; overrides are not allowed here", "pdd")
    at = override.handoff_at
    if at is None:
        return
    if not 0 <= at <= MAX_HANDOFF_AT:
        raise refuse("handoff_at", at, f"0 to {MAX_HANDOFF_AT}")
    if override.pipeline in ("direct", "local"):
        raise refuse("handoff_at", at, f"nothing with pipeline {override.pipeline!r}: there is no handoff")


def _timeout_s(given: float | None, longest_s: float) -> float:
    if given is None:
        return longest_s
    if not (math.isfinite(given) and given > 0):
        raise refuse("timeout_s", given, "positive seconds")
    return min(given, longest_s)


def _namespace(tenant: str, salt: str | None) -> str:
    assert "/" not in tenant, f"tenant {tenant!r}"
    if salt is None:
        return tenant
    if not 1 <= len(salt) <= MAX_SALT_CHARACTERS:
        raise refuse("cache_salt", salt, f"1 to {MAX_SALT_CHARACTERS} characters")
    check_text("cache_salt", salt)
    return f"{tenant}/{salt}"
