"""What the OpenAI door reads from a JSON body, and what it refuses.

Three kinds of fields: those below are honoured; those in ``_HARMLESS`` would change the answer but are not supported, so any value
that asks for something is refused with their name; everything else is ignored, as OpenAI-compatible servers do. Fields that would
tell this service where other machines are are refused whatever they say: topology never comes from clients.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import from_json

from pdd.errors import Code, PddError
from pdd.serving.openai.errors import from_validation
from pdd.serving.request import HandoffName, PipelineName
from pdd.serving.sampling_check import MAX_LOGPROBS

MAX_CHOICES = 16

# Field -> values that ask for nothing. null never does.
_HARMLESS: dict[str, tuple[object, ...]] = {
    "audio": (),
    "chat_template": (),
    "documents": ([],),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "grammar": (),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "length_penalty": (1, 1.0),
    "logits_processors": ([],),
    "media_io_kwargs": ({},),
    "mm_processor_kwargs": ({},),
    "modalities": (["text"],),
    "moderation": (),
    "priority": (0,),
    "prompt_embeds": (),
    "reasoning_effort": (),
    "regex": (),
    "repetition_detection": (),
    "response_format": ({"type": "text"},),
    "return_prompt_text": (False,),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "spaces_between_special_tokens": (True,),
    "structured_outputs": (),
    "suffix": ("",),
    "thinking_token_budget": (-1,),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
    "vllm_xargs": ({},),
    "watermarking": (False,),
    "web_search_options": (),
}
# Honoured by the other endpoint alone.
_NOT_OF_CHAT: dict[str, tuple[object, ...]] = {"best_of": (1,), "echo": (False,)}
_NOT_OF_COMPLETIONS: dict[str, tuple[object, ...]] = {
    "add_generation_prompt": (True,),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "max_completion_tokens": (),
    "top_logprobs": (),
}
_NAMES_MACHINES = re.compile(
    r"kv_transfer|bootstrap|bridge|peer|topology|epoch|endpoint|(^|_)(host|hosts|port|ports|addr|address|url|remote|transfer)(_|$)"
)


# What a client may give a chat template: nothing that has methods of its own to call.
Scalar = str | int | float | bool | None
TemplateValue = Scalar | list[Scalar]


class _Lenient(BaseModel):
    """Strict types (no "1" for 1, no true for 1), unknown fields ignored, null as good as absent where a default is None."""

    model_config = ConfigDict(extra="ignore", strict=True, frozen=True, allow_inf_nan=False)


class StreamOptions(_Lenient):
    include_usage: bool | None = None


class PddOptions(BaseModel):
    """Ours, hence strict: what to report, and which way the request should go (only where the launch config allows it)."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    report_origin: bool = False
    timeline: bool = False
    pipeline: PipelineName | None = None
    handoff: HandoffName | None = None
    handoff_at: int | None = None


class SharedFields(_Lenient):
    """Shared by both endpoints. Ranges are checked where sampling parameters are derived, for both doors alike."""

    model: str | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    logprob_token_ids: list[int] | None = None
    prompt_logprobs: int | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    cache_salt: str | None = None
    pdd: PddOptions | None = None


class Message(_Lenient):
    """``content``: a string, or a list of {"type": "text", "text": ...}; read by ``params.message_text``, which names what it refuses."""

    role: str
    content: object = None
    tool_calls: list[object] | None = None
    function_call: dict[str, object] | None = None


class ChatRequest(SharedFields):
    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, TemplateValue] | None = None


class CompletionRequest(SharedFields):
    """``prompt``: str, list of str, list of ids or list of lists of ids; read by ``params.completion_prompts``."""

    prompt: object = None
    echo: bool | None = None
    best_of: int | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None


def read_chat(body: bytes) -> ChatRequest:
    """Raises PddError(INVALID_ARGUMENT) naming the field."""
    fields = _fields(body, _NOT_OF_CHAT)
    try:
        return ChatRequest.model_validate(fields)
    except ValidationError as error:
        raise from_validation(error, fields) from error


def read_completion(body: bytes) -> CompletionRequest:
    """Raises PddError(INVALID_ARGUMENT) naming the field."""
    fields = _fields(body, _NOT_OF_COMPLETIONS)
    try:
        return CompletionRequest.model_validate(fields)
    except ValidationError as error:
        raise from_validation(error, fields) from error


def _fields(body: bytes, of_the_other: dict[str, tuple[object, ...]]) -> dict[str, object]:
    """The JSON object in ``body``. NaN, Infinity, lone surrogates, invalid UTF-8 and bottomless nesting are refused by the parser."""
    try:
        fields = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise PddError(Code.INVALID_ARGUMENT, f"the body is not valid JSON: {error}") from error
    if not isinstance(fields, dict):
        raise PddError(Code.INVALID_ARGUMENT, "the body must be a JSON object")
    refused = _HARMLESS | of_the_other
    for name, value in fields.items():
        if _NAMES_MACHINES.search(name):
            raise PddError(Code.INVALID_ARGUMENT, f"{name}: not accepted from clients: the service alone decides where KV goes", name)
        if name in refused and value is not None and not any(_same(value, harmless) for harmless in refused[name]):
            raise PddError(Code.INVALID_ARGUMENT, f"{name}: not supported by this service", name)
    return fields


def _same(value: object, harmless: object) -> bool:
    """Equal, and not only because True == 1."""
    return value == harmless and isinstance(value, bool) == isinstance(harmless, bool)
