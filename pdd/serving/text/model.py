"""The text side of a model: text and chats to token ids, token ids to the bytes they stand for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from tokenizers import Tokenizer

from pdd.serving.text.model_files import read_text_files
from pdd.serving.text.template import PLAIN_CHAT, ChatOptions, ChatTemplate
from pdd.serving.text.unicode import check_unicode
from pdd.serving.text.vocabulary import Vocabulary


class TextModel:
    """Immutable after construction; ``encode`` and ``render_chat`` release the GIL while they tokenize, so a thread may run them."""

    def __init__(self, tokenizer: Tokenizer, chat_template: ChatTemplate | None, eos_token_ids: frozenset[int]) -> None:
        """Raises ValueError for a tokenizer whose decoder is not understood."""
        self.vocabulary = Vocabulary(tokenizer)
        self.eos_token_ids = eos_token_ids
        self._tokenizer = tokenizer
        self._chat_template = chat_template

    @classmethod
    def load(cls, model_dir: str | Path) -> TextModel:
        """From a directory with ``tokenizer.json`` (and companions) or one ``.gguf`` file. Raises ValueError, one line, when it cannot."""
        files = read_text_files(Path(model_dir))
        template = None if files.chat_template is None else ChatTemplate(files.chat_template, files.special_tokens)
        return cls(files.tokenizer, template, files.eos_token_ids)

    @property
    def vocab_size(self) -> int:
        """Ids that the tokenizer knows: 0 to ``vocab_size`` - 1. The model's own vocabulary may be larger (padding)."""
        return self.vocabulary.size

    def encode(self, text: str, add_special: bool) -> list[int]:
        """Token ids of ``text``; ``add_special``: with what the model puts around a text (BOS). Raises ValueError for a lone surrogate."""
        check_unicode(text, "text")
        (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special)
        return list(encoding.ids)

    def render_chat(self, messages: Sequence[Mapping[str, str]], options: ChatOptions = PLAIN_CHAT) -> list[int]:
        """Token ids of a conversation through the model's chat template, up to where the assistant's answer begins or as ``options`` say.

        ``messages``: {"role": ..., "content": ...}. Raises ValueError, one line, for malformed messages, for what the template refuses, and
        for a model without a template.
        """
        if self._chat_template is None:
            raise ValueError("messages: this model has no chat template, only plain text or token ids can be given")
        return self.encode(self._chat_template.render(messages, options), options.add_special)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token stands for, perhaps a part of a character; special tokens have their name's. Empty for padding ids."""
        return self.vocabulary.token_bytes(token_id)

    def token_text(self, token_id: int) -> str:
        """``token_bytes`` as text; a part of a character shows as U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", errors="replace")
