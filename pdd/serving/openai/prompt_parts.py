"""What an answer says of the prompt itself: its echo, and log-probabilities of its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pdd.serving.admission_check import Prompt, TextPrompt
from pdd.serving.openai.logprobs import LOWEST, shown_token
from pdd.serving.text.detokenizer import Detokenizer
from pdd.serving.text.model import TextModel
from pddbridge.sampling_params import TokenRecord


@dataclass(frozen=True)
class Echo:
    """The prompt's text and where in it each of its tokens begins."""

    text: str
    offsets: tuple[int, ...]


def echo_of(text: TextModel, prompt: Prompt, ids: Sequence[int]) -> Echo:
    """The text of ``ids``, special tokens included; but one put before a given text (BOS) is not part of it."""
    detokenizer = Detokenizer(text.vocabulary, (), with_special=True)
    shown, offsets = "", []
    for index, token_id in enumerate(ids):
        offsets.append(len(shown))
        added = index == 0 and isinstance(prompt, TextPrompt) and _is_put_before(text, prompt.text, token_id)
        shown += "" if added else detokenizer.push(token_id)
    return Echo(shown, tuple(offsets))


def vllm_prompt_logprobs(text: TextModel, records: Sequence[TokenRecord], num_logprobs: int) -> list[object]:
    """vLLM's shape: null for the first token, then {id: {logprob, rank, decoded_token}} of the token and the most likely. A token's rank is
    told where it is among those."""
    shown: list[object] = []
    for record in records:
        if record.logprob is None:
            shown.append(None)
            continue
        ranks = {token_id: rank for rank, (token_id, _) in enumerate(record.top_logprobs[:num_logprobs], 1)}
        found = {record.token_id: record.logprob, **dict(record.top_logprobs[:num_logprobs])}
        shown.append(
            {
                str(token_id): {
                    "logprob": max(logprob, LOWEST),
                    "rank": ranks.get(token_id),
                    "decoded_token": shown_token(text, token_id),
                }
                for token_id, logprob in found.items()
            }
        )
    return shown


def _is_put_before(text: TextModel, given: str, token_id: int) -> bool:
    return not text.vocabulary.makes_text(token_id) and not given.startswith(text.token_text(token_id))
