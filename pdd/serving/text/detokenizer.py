"""Token ids to text, one at a time. The pieces together are exactly the text that the ids after the prompt add to it.

What is decoded is the byte sequence of the tokens, as one UTF-8 stream that began in the prompt: spaces stay, a character split over
tokens comes out with its last byte, invalid bytes become U+FFFD as they would in a decode of the whole. Nothing of the prompt is ever
emitted: at most a character whose first bytes the prompt ended with. The state is a function of prompt and log, so pushing the log again
restores it.

In one case a decode of the whole by the tokenizers library differs: in SentencePiece vocabularies it replaces *every* byte of a run of
byte tokens that is not valid as a whole; here the valid characters of such a run stay, for they were streamed before the bad byte came.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from pdd.serving.text.vocabulary import Vocabulary

_MAX_INCOMPLETE_BYTES = 3  # of a UTF-8 character of four


class Detokenizer:
    """State of one text. ``prompt_ids`` may be empty; the text then starts with the first pushed token. ``with_special``: special tokens
    are text, too."""

    def __init__(self, vocabulary: Vocabulary, prompt_ids: Sequence[int], with_special: bool = False) -> None:
        self._vocabulary = vocabulary
        self._with_special = with_special
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._at_start = True
        self._spaces_to_strip = vocabulary.strip_spaces
        for token_id in prompt_ids:
            if not (self._at_start or self._spaces_to_strip):
                break
            self._bytes(token_id)
        self._prompt_bytes = _incomplete_end(vocabulary, prompt_ids)

    def push(self, token_id: int) -> str:
        """Text that ``token_id`` completes; empty for a special token, an id without token, or while a character is incomplete."""
        data = self._bytes(token_id)
        if data and self._prompt_bytes:
            if _continues(self._prompt_bytes, data[:1]):
                self._utf8.decode(self._prompt_bytes)
            self._prompt_bytes = b""
        return self._utf8.decode(data)

    def finish(self) -> str:
        """U+FFFD if the last character stayed incomplete, else nothing. Nothing may be pushed afterwards."""
        return self._utf8.decode(b"", final=True)

    def _bytes(self, token_id: int) -> bytes:
        """Bytes of the next token of the text, minus what the start of a text loses."""
        if not self._vocabulary.makes_text(token_id):
            return self._vocabulary.token_bytes(token_id) if self._with_special else b""
        data = self._vocabulary.first_token_bytes(token_id) if self._at_start else self._vocabulary.token_bytes(token_id)
        self._at_start = False
        while data and self._spaces_to_strip:
            if not data.startswith(b" "):
                self._spaces_to_strip = 0
                break
            data = data[1:]
            self._spaces_to_strip -= 1
        return data


def _incomplete_end(vocabulary: Vocabulary, ids: Sequence[int]) -> bytes:
    """Bytes of the incomplete UTF-8 character that the text of ``ids`` ends with. Looks only at the last few: UTF-8 synchronises itself."""
    tail = b""
    for token_id in reversed(ids):
        if len(tail) >= _MAX_INCOMPLETE_BYTES:
            break
        if vocabulary.makes_text(token_id):
            tail = vocabulary.token_bytes(token_id) + tail
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(tail)
    return decoder.getstate()[0]


def _continues(incomplete: bytes, byte: bytes) -> bool:
    """Whether ``byte`` carries the incomplete UTF-8 character on. If not, what the prompt left behind is the prompt's own invalid text."""
    try:
        codecs.getincrementaldecoder("utf-8")("strict").decode(incomplete + byte)
    except UnicodeDecodeError:
        return False
    return True
