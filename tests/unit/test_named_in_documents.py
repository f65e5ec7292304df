"""What documents name is there: files, modules and what is in them, commands and their options."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import typer.main
from typer.core import TyperGroup

from pdd.cli import app

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md")), ROOT / "bridge" / "README.md", ROOT / "kernels" / "README.md"]
PACKAGES = {
    "pdd": ROOT / "pdd",
    "pddbridge": ROOT / "bridge" / "pddbridge",
    "pddkernels": ROOT / "kernels" / "pddkernels",
    "pddjax": ROOT / "pddjax",
    "pddtorch": ROOT / "pddtorch",
    "benchmarks": ROOT / "benchmarks",
}
FILES = [
    path.relative_to(ROOT).as_posix()
    for folder in ROOT.iterdir()
    if folder.is_dir() and not folder.name.startswith(".")
    for path in folder.rglob("*")
    if path.is_file()
]
# Configs by their path alone: those without one are a reader's own.
_FILE = re.compile(r"(?<![\w/.-])((?:[\w.-]+/)*[\w-]+\.(?:py|cpp|h|proto)|(?:[\w.-]+/)+[\w-]+\.yaml)(?:::(\w+))?(?![\w/])")
_NO_FILES = ("llama.cpp",)
_MODULE = re.compile(rf"(?<![\w/.-])((?:{'|'.join(PACKAGES)})(?:\.[A-Za-z_]\w*)+)(?![\w/])")
_REFERENCE = re.compile(r":(?:mod|class|func|meth|data):`~?([\w.]+)`")
# At the beginning of a line of a code block or of a span: what somebody may run.
_COMMAND = re.compile(r"(?:^|`)(?:sudo )?((?:\.venv/bin/)?pdd [a-z][^`\n]*)", re.MULTILINE)
_TARGET = re.compile(r"(?:^|`)make ([a-z][\w-]*)", re.MULTILINE)
# The protobuf package, the field "pdd" of HTTP bodies, and the name in certificates.
_NO_MODULES = re.compile(r"pdd\.(v1|report_origin|internal)\b")
by_document = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: str(document.relative_to(ROOT)))


def text_of(document: Path) -> str:
    return document.read_text(encoding="utf-8")


def files_named(name: str, document: Path) -> list[Path]:
    """By its path from the root or from the document, or by the end of its path."""
    found = [ROOT / file for file in FILES if file == name or file.endswith(f"/{name}")]
    return [*found, *(path for path in [document.parent / name] if path.is_file())]


def is_there(dotted: str) -> bool:
    """A package, a module, or a name that is written in the one or the other."""
    package, *rest = dotted.split(".")
    where = PACKAGES[package]
    while rest and (where / rest[0]).is_dir():
        where /= rest.pop(0)
    if rest and (where / f"{rest[0]}.py").is_file():
        where /= f"{rest.pop(0)}.py"
    if not rest:
        return True
    source = where if where.is_file() else where / "__init__.py"
    return source.is_file() and re.search(rf"\b{rest[0]}\b", source.read_text(encoding="utf-8")) is not None


@by_document
def test_a_file_that_a_document_names_is_there(document: Path) -> None:
    missing = []
    for name, within in _FILE.findall(text_of(document)):
        if name in _NO_FILES:
            continue
        found = files_named(name, document)
        if not any(not within or re.search(rf"\b{within}", path.read_text(encoding="utf-8")) for path in found):
            missing.append(f"{name}::{within}" if within else name)
    assert missing == []


@by_document
def test_a_module_that_a_document_names_is_there(document: Path) -> None:
    named = [dotted for dotted in _MODULE.findall(text_of(document)) if not _NO_MODULES.match(dotted) and dotted.rpartition(".")[2] != "py"]
    assert [dotted for dotted in named if not is_there(dotted)] == []


@pytest.mark.parametrize("package", PACKAGES)
def test_a_module_that_a_docstring_refers_to_is_there(package: str) -> None:
    wrong = []
    for path in PACKAGES[package].rglob("*.py"):
        named = [name for name in _REFERENCE.findall(text_of(path)) if name.partition(".")[0] in PACKAGES]
        wrong += [f"{path.relative_to(ROOT)}: {name}" for name in named if not is_there(name)]
    assert wrong == []


@by_document
def test_a_command_that_a_document_names_is_there_with_its_options(document: Path) -> None:
    wrong = []
    for line in _COMMAND.findall(text_of(document).replace("\\\n", " ")):
        words = re.split(r"[|;&>#]", line)[0].split()[1:]
        command = typer.main.get_command(app)
        while isinstance(command, TyperGroup) and words:
            name = words.pop(0)
            if name not in command.commands:
                wrong.append(f"pdd … {name}")
                break
            command = command.commands[name]
        options = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
        wrong += [f"{line}: {option}" for word in words for option in re.findall(r"^\[?(--[\w-]+)", word) if option not in options]
    assert wrong == []


@by_document
def test_a_make_target_that_a_document_names_is_there(document: Path) -> None:
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert [target for target in _TARGET.findall(text_of(document)) if target not in targets] == []


def test_what_is_not_there_is_noticed() -> None:
    """Every pattern finds something in the documents, and what is made up is not taken for there."""
    everything = "\n".join(text_of(document) for document in DOCUMENTS)
    assert all(len(pattern.findall(everything)) > 5 for pattern in (_FILE, _MODULE, _COMMAND, _TARGET))
    assert files_named("pdd/serving/coordinator.py", DOCUMENTS[0])
    assert not files_named("pdd/serving/coordinators.py", DOCUMENTS[0])
    assert is_there("pdd.serving.coordinator.Coordinator")
    assert not is_there("pdd.serving.coordinators")
    assert not is_there("pdd.serving.coordinator.Coordinators")
