"""Text models from directories: files that win, special tokens, templates, and one clear line for everything broken."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import datetime
from itertools import pairwise
from pathlib import Path

import gguf
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from pdd.serving.text.gguf_tokenizer import read_gguf_tokenizer
from pdd.serving.text.model import TextModel
from pdd.serving.text.stream import TextStream
from pdd.serving.text.template import ChatTemplate
from tests.support.tiny_models import make_tiny_llama
from tests.support.tokenizers import SPECIALS, WORDS, byte_level_tokenizer

CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "héllo 😀"}]
TEXTS = ["", " ", "hello  world", "ünïcode 😀 日本\n\n\ttabs  ", "it's 12345 o'clock", "<|im_end|> and <think> inside"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("text") / "tiny")


@pytest.fixture(scope="module")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Nothing but the GGUF itself."""
    path = make_tiny_llama(tmp_path_factory.mktemp("text") / "gguf", form="gguf")
    for file in path.iterdir():
        if file.suffix != ".gguf":
            file.unlink()
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    byte_level_tokenizer().save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def write(file: Path, value: object) -> None:
    file.write_text(value if isinstance(value, str) else json.dumps(value), encoding="utf-8")


@pytest.mark.parametrize("text", TEXTS)
def test_ids_and_bytes_go_round(tiny: Path, tiny_gguf: Path, text: str) -> None:
    model, from_gguf = TextModel.load(tiny), TextModel.load(tiny_gguf)
    ids = model.encode(text, add_special=True)
    assert b"".join(model.token_bytes(i) for i in ids).decode() == text
    assert ids == Tokenizer.from_file(str(tiny / "tokenizer.json")).encode(text).ids
    assert ids == from_gguf.encode(text, add_special=True)
    assert [from_gguf.token_bytes(i) for i in ids] == [model.token_bytes(i) for i in ids]


def test_chat_goes_through_the_template(tiny: Path, tiny_gguf: Path) -> None:
    for model in (TextModel.load(tiny), TextModel.load(tiny_gguf)):
        ids = model.render_chat(CHAT)
        assert b"".join(map(model.token_bytes, ids)).decode() == (
            "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhéllo 😀<|im_end|>\n<|im_start|>assistant\n"
        )
        assert ids.count(1) == 3


@pytest.mark.slow
def test_chat_equals_transformers(tiny: Path, tiny_gguf: Path) -> None:
    """Rendering is our own, so it is held against transformers' (in its own process: nothing here may import it)."""
    script = (
        "import json, sys; from transformers import AutoTokenizer; t = AutoTokenizer.from_pretrained(sys.argv[1]);"
        "print(json.dumps(list(t.apply_chat_template(json.loads(sys.argv[2]), add_generation_prompt=True, return_dict=True)['input_ids'])))"
    )
    done = subprocess.run([sys.executable, "-c", script, str(tiny), json.dumps(CHAT)], capture_output=True, text=True, check=True)
    expected = json.loads(done.stdout)
    assert TextModel.load(tiny).render_chat(CHAT) == expected
    assert TextModel.load(tiny_gguf).render_chat(CHAT) == expected


def test_loading_imports_no_framework(tiny: Path, tiny_gguf: Path) -> None:
    script = (
        "import sys; from pdd.serving.text.model import TextModel; [TextModel.load(p) for p in sys.argv[1:]];"
        "print(sorted({'torch', 'transformers', 'jax'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script, str(tiny), str(tiny_gguf)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_stop_ids_are_the_union_of_all_files(tiny: Path, tiny_gguf: Path, folder: Path) -> None:
    """Case 104."""
    assert TextModel.load(tiny).eos_token_ids == {0, 2}
    assert TextModel.load(tiny_gguf).eos_token_ids == {2}
    assert TextModel.load(folder).eos_token_ids == frozenset()
    write(folder / "tokenizer_config.json", {"eos_token": {"content": "</s>"}})
    write(folder / "config.json", {"eos_token_id": 7})
    write(folder / "generation_config.json", {"eos_token_id": [8, 9]})
    assert TextModel.load(folder).eos_token_ids == {1, 7, 8, 9}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, []),
        ({"bos_token": "<s>"}, []),
        ({"bos_token": "<s>", "add_bos_token": True}, [0]),
        ({"bos_token": {"content": "<s>"}, "eos_token": "</s>", "add_bos_token": True, "add_eos_token": True}, [0, 1]),
        ({"bos_token": "<s>", "add_bos_token": False}, []),
    ],
)
def test_special_tokens_around_a_text(folder: Path, config: dict[str, object], expected: list[int]) -> None:
    write(folder / "tokenizer_config.json", config)
    model = TextModel.load(folder)
    text = model.encode("x", add_special=False)
    assert text == [3 + ord("x")]
    assert [i for i in model.encode("x", add_special=True) if i != text[0]] == expected
    assert model.encode("x", add_special=True) == [*expected[:1], *text, *expected[1:]]


def test_truncation_in_the_file_is_not_ours(folder: Path) -> None:
    tokenizer = byte_level_tokenizer()
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=16)
    tokenizer.save(str(folder / "tokenizer.json"))
    assert len(TextModel.load(folder).encode("123456789", add_special=True)) == 9


def test_which_template_wins(folder: Path) -> None:
    def rendered() -> str:
        model = TextModel.load(folder)
        return b"".join(model.token_bytes(i) for i in model.render_chat([{"role": "user", "content": "c"}])).decode()

    write(folder / "tokenizer_config.json", {"bos_token": "<s>", "chat_template": "{{ bos_token }}A{{ messages[0].content }}"})
    assert rendered() == "<s>Ac"
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "B"}]
    write(folder / "tokenizer_config.json", {"chat_template": named})
    assert rendered() == "B"
    write(folder / "chat_template.jinja", "C")
    assert rendered() == "C"


def test_no_template_is_the_callers_mistake(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"^messages: this model has no chat template"):
        TextModel.load(folder).render_chat([{"role": "user", "content": "x"}])


def test_token_text(tiny: Path) -> None:
    model = TextModel.load(tiny)
    (e_acute, _) = model.encode("é", add_special=False)
    assert (model.token_bytes(e_acute), model.token_text(e_acute)) == (b"\xc3", "�")
    assert model.token_text(2) == "<|im_end|>"
    assert model.token_bytes(model.vocab_size + 5) == b""


@pytest.mark.parametrize("text", ["\ud800", "ok \udfff tail"])
def test_lone_surrogates_are_refused(tiny: Path, text: str) -> None:
    model = TextModel.load(tiny)
    with pytest.raises(ValueError, match=r"^text: given lone surrogate U\+D[8F]"):
        model.encode(text, add_special=True)
    with pytest.raises(ValueError, match=r"^messages\[0\]\.content: given lone surrogate"):
        model.render_chat([{"role": "user", "content": text}])


@pytest.mark.parametrize(
    ("source", "messages", "line"),
    [
        ("x", [], "messages: given none"),
        ("x", [{"role": "user", "content": 3}], "messages[0].content: given int"),
        ("{{ raise_exception('roles must\nalternate') }}", CHAT, "messages: the chat template refused them: roles must alternate"),
        ("{{ messages[5].content.x }}", CHAT, "messages: the chat template refused them: "),
        ("{{ 1 + messages[0].content }}", CHAT, "messages: the chat template refused them: "),
        ("{{ 1 / 0 }}", CHAT, "messages: the chat template refused them: "),
        ("{{ ''.__class__.__mro__ }}", CHAT, "messages: the chat template refused them: "),
        ("{{ messages.append(1) }}", CHAT, "messages: the chat template refused them: "),
    ],
)
def test_what_a_template_refuses_is_one_line(source: str, messages: list[dict[str, str]], line: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 (the line is compared below)
        ChatTemplate(source, {}).render(messages)
    assert str(caught.value).startswith(line)
    assert "\n" not in str(caught.value)


def test_templates_see_what_transformers_gives_them() -> None:
    source = (
        "{% for m in messages %}\n  {% if m.role == 'system' %}{% continue %}{% endif %}"
        "{% generation %}{{ m | tojson }}{% endgeneration %}{% endfor %}"
        "{{ strftime_now('%Y') }}{{ missing }}{% if tools is none and add_generation_prompt %}!{% endif %}"
    )
    template = ChatTemplate(source, {}, now=lambda: datetime(2026, 11, 30))
    assert template.render(CHAT) == '{"role": "user", "content": "héllo 😀"}2026!'


def test_a_template_that_is_not_jinja_is_refused_on_loading(folder: Path) -> None:
    write(folder / "chat_template.jinja", "{% for %}")
    with pytest.raises(ValueError, match=r"^chat template: "):
        TextModel.load(folder)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"model": {"type": "Nonsense"}}'])
def test_a_broken_tokenizer_file_is_one_line(folder: Path, content: str) -> None:
    write(folder / "tokenizer.json", content)
    with pytest.raises(ValueError, match=r"^tokenizer .*tokenizer\.json: [^\n]+$"):
        TextModel.load(folder)


def test_directories_without_a_tokenizer_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"need tokenizer\.json or exactly one \.gguf file, found \[\]"):
        TextModel.load(tmp_path)
    (tmp_path / "x.gguf").write_bytes(b"GGUF" + b"\xff" * 50)
    with pytest.raises(ValueError, match=r"^tokenizer .*x\.gguf: not a readable GGUF file: [^\n]+$"):
        TextModel.load(tmp_path)


def gguf_with(path: Path, **changes: object) -> Path:
    """A GGUF with the SentencePiece tokenizer of tests.support as llama.cpp's converter writes it; scores fall with the id."""
    tokens = [*SPECIALS, "<think>", *(f"<0x{byte:02X}>" for byte in range(256)), *WORDS, "xx"]
    kinds = [gguf.TokenType.CONTROL] * 2 + [gguf.TokenType.USER_DEFINED] + [gguf.TokenType.BYTE] * 256
    kinds += [gguf.TokenType.NORMAL] * (len(tokens) - len(kinds))
    writer = gguf.GGUFWriter(path / "sp.gguf", "llama")
    writer.add_tokenizer_model(str(changes.get("model", "llama")))
    writer.add_token_list(tokens)
    writer.add_token_scores([-float(i) for i in range(len(tokens))])
    writer.add_token_types(kinds[: len(kinds) - int(bool(changes.get("short")))])
    writer.add_bos_token_id(int(str(changes.get("bos", 0))))
    writer.add_eos_token_id(1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path / "sp.gguf"


def test_sentence_piece_from_gguf(tmp_path: Path) -> None:
    found = read_gguf_tokenizer(gguf_with(tmp_path))
    model = TextModel(found.tokenizer, None, frozenset({1}))
    assert found.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    for text in ("he xx", " x¤", "é 😀<think>"):
        ids = model.encode(text, add_special=True)
        assert ids[0] == 0
        stream = TextStream(model, [])
        assert "".join(stream.push(i).text for i in ids) == text
    assert [model.token_text(i) for i in model.encode("he xx", add_special=False)] == [" he", " ", "xx"]


@pytest.fixture(scope="module")
def sentence_piece(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return read_gguf_tokenizer(gguf_with(tmp_path_factory.mktemp("sp"))).tokenizer


@given(st.lists(st.sampled_from([" ", " ", "he", "h", "e", "x", "xx", "é", "日本", "本", "¤", " a "]), max_size=10).map("".join))
def test_sentence_piece_merges_the_best_score_first(sentence_piece: Tokenizer, text: str) -> None:
    """Against SentencePiece's rule done naively: join the neighbours whose union scores best (here: lowest id), leftmost first."""
    words = {token: sentence_piece.token_to_id(token) for token in (*WORDS, "xx")}
    pieces = list(("▁" + text).replace(" ", "▁")) if text else []
    while True:
        joins = [(words[a + b], i) for i, (a, b) in enumerate(pairwise(pieces)) if a + b in words and a in words and b in words]
        if not joins:
            break
        _, i = min(joins)
        pieces[i : i + 2] = [pieces[i] + pieces[i + 1]]
    expected = [i for piece in pieces for i in ([words[piece]] if piece in words else [3 + byte for byte in piece.encode()])]
    assert sentence_piece.encode(text, add_special_tokens=False).ids == expected


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"model": "bert"}, "tokenizer.ggml.model: given 'bert', allowed ['gpt2', 'llama']"),
        ({"model": "gpt2"}, "tokenizer.ggml.pre: given None, allowed ['gpt-2', 'llama-bpe', 'qwen2', 'smollm']"),
        ({"bos": 5000}, "tokenizer.ggml.bos_token_id: given 5000"),
        ({"short": True}, "tokenizer.ggml.token_type: "),
    ],
)
def test_gguf_tokenizers_that_cannot_be_built_name_the_key(tmp_path: Path, changes: dict[str, object], line: str) -> None:
    with pytest.raises(ValueError, match=r"^tokenizer .*sp\.gguf: [^\n]+$") as caught:
        read_gguf_tokenizer(gguf_with(tmp_path, **changes))
    assert line in str(caught.value)
