"""The text side of one request: accepted token ids in, releasable text out. Recomputed from (prompt, log) by whoever needs it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pdd.serving.text.detokenizer import Detokenizer
from pdd.serving.text.model import TextModel
from pdd.serving.text.stop_strings import StopStrings
from pdd.serving.text.unicode import check_unicode


@dataclass(frozen=True)
class TextStep:
    """``text``: what may be sent now. ``stopped``: a stop string is complete; it and what follows are not in the text, the request ends."""

    text: str
    stopped: bool


class TextStream:
    """Push every accepted token in log order, wherever it came from, then ``finish`` unless a stop string stopped it.

    A stop string counts only if its last character came after ``min_tokens`` tokens. A token that ended the request by its id makes no
    text unless ``include_stop``: pass ``ends=True`` (special tokens such as EOS make none anyway, unless ``with_special``).
    """

    def __init__(
        self,
        text_model: TextModel,
        prompt_ids: Sequence[int],
        stop_strings: Sequence[str] = (),
        min_tokens: int = 0,
        *,
        with_special: bool = False,
        include_stop: bool = False,
    ) -> None:
        """``with_special``: special tokens make text · ``include_stop``: what stops the text is part of it.

        Raises ValueError for an empty stop string or one that is not valid Unicode.
        """
        for index, stop in enumerate(stop_strings):
            check_unicode(stop, f"stop[{index}]")
        self._detokenizer = Detokenizer(text_model.vocabulary, prompt_ids, with_special)
        self._stop_strings = StopStrings(stop_strings, include_stop)
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._num_chars = 0
        self._stopped = False

    @classmethod
    def resume(
        cls, text_model: TextModel, prompt_ids: Sequence[int], stop_strings: Sequence[str], min_tokens: int, log_ids: Sequence[int]
    ) -> TextStream:
        """The stream as it is after ``log_ids`` were pushed."""
        stream = cls(text_model, prompt_ids, stop_strings, min_tokens)
        for token_id in log_ids:
            stream.push(token_id)
        return stream

    @property
    def num_chars(self) -> int:
        """Characters released so far."""
        return self._num_chars

    def push(self, token_id: int, *, ends: bool = False) -> TextStep:
        """Text released by the next token of the log. Must not be called after a stop."""
        assert not self._stopped, "a token was pushed after the text had stopped"
        self._num_tokens += 1
        text = "" if ends and not self._include_stop else self._detokenizer.push(token_id)
        step = self._stop_strings.push(text, armed=self._num_tokens > self._min_tokens)
        self._stopped = step.stopped
        self._num_chars += len(step.text)
        return TextStep(step.text, step.stopped)

    def finish(self) -> str:
        """Everything still held back: the request ended, and no stop string did it. Empty after a stop."""
        if self._stopped:
            return ""
        self._stopped = True
        last = self._stop_strings.push(self._detokenizer.finish(), armed=self._num_tokens > self._min_tokens)
        text = last.text if last.stopped else last.text + self._stop_strings.finish()
        self._num_chars += len(text)
        return text
