"""A model's chat template: messages to the text that is tokenized.

Rendered in a sandbox as Hugging Face transformers does (same environment, same names), without importing it: that costs seconds.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import NoReturn

from jinja2 import TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pdd.serving.text.unicode import check_unicode


@dataclass(frozen=True)
class ChatOptions:
    """How a conversation is worded. ``continue_final_message``: its last message is left open instead of an answer being begun ·
    ``variables``: what else the template may read · ``add_special``: what the model puts around a text is added to the template's.
    """

    add_generation_prompt: bool = True
    continue_final_message: bool = False
    variables: tuple[tuple[str, object], ...] = ()
    add_special: bool = False


PLAIN_CHAT = ChatOptions()


class _Generation(Extension):
    """``{% generation %}`` marks the assistant's part for training; here it is only what it encloses."""

    tags = {"generation"}  # noqa: RUF012 (declared so by Jinja)

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """``special_tokens``: names and texts such as {"bos_token": "<s>"}, visible to the template. ``now`` feeds ``strftime_now``."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], now: Callable[[], datetime] = datetime.now) -> None:
        """Raises ValueError, one line, for a template that is not Jinja."""
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation])
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: now().strftime(form)
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise ValueError(f"chat template: {_line(error)}") from error
        self._special_tokens = dict(special_tokens)

    def render(self, messages: Sequence[Mapping[str, str]], options: ChatOptions = PLAIN_CHAT) -> str:
        """Text of the conversation, ending where the assistant's answer begins, or as ``options`` say.

        ``messages``: at least one, each with ``role`` and ``content``. Raises ValueError, one line, for malformed messages, for what the
        template refuses (``raise_exception``), and for what it cannot handle.
        """
        if not messages:
            raise ValueError("messages: given none, at least one is needed")
        for index, message in enumerate(messages):
            for field, value in message.items():
                if not isinstance(value, str):
                    raise ValueError(f"messages[{index}].{field}: given {type(value).__name__}, a string is expected")
                check_unicode(value, f"messages[{index}].{field}")
        plain = [dict(message) for message in messages]
        begins_answer = options.add_generation_prompt and not options.continue_final_message
        ours = {"messages": plain, "tools": None, "documents": None, "add_generation_prompt": begins_answer, **self._special_tokens}
        if taken := sorted(name for name, _ in options.variables if name in ours or name in self._template.environment.globals):
            raise ValueError(f"chat_template_kwargs: given {taken[0]!r}, which the service sets itself")
        try:
            text = self._template.render(dict(options.variables) | ours)
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
            # A template is a program of the model's author: what it raises is its way to refuse these messages.
            raise ValueError(f"messages: the chat template refused them: {_line(error)}") from error
        return _open_ended(text, messages[-1]["content"]) if options.continue_final_message else text


def _open_ended(text: str, last: str) -> str:
    """``text`` up to the end of its last message's content, which templates may have stripped of spaces."""
    at = text.rfind(last.strip())
    if at < 0:
        raise ValueError("continue_final_message: the chat template does not show the last message as it is")
    kept = next(form for form in (last.lstrip(), last.strip()) if text.startswith(form, at))
    return text[: at + len(kept)]


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _to_json(value: object, ensure_ascii: bool = False, indent: int | None = None, sort_keys: bool = False) -> str:
    """As transformers': Jinja's own filter would escape for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, sort_keys=sort_keys)


def _line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
