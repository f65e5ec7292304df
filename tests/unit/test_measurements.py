"""Every figure has its raw file and the command that makes it, and no document points to what is not there."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MEASUREMENTS = ROOT / "docs" / "measurements"
DOCUMENTS = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md")), ROOT / "bridge" / "README.md", ROOT / "kernels" / "README.md"]
# In a code block or between backticks: what a reader can run.
_COMMAND = re.compile(r"(?:^|`)(?:sudo )?(?:(?:make|pdd) \w|python (?:-m |benchmarks/)\S)", re.MULTILINE)
_LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)\s]*)?\)")


def sections(document: Path) -> list[str]:
    """From heading to heading, what is before the first included."""
    return re.split(r"^(?=#{1,4} )", document.read_text(encoding="utf-8"), flags=re.MULTILINE)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: str(document.relative_to(ROOT)))
def test_what_a_document_links_to_is_there(document: Path) -> None:
    targets = [target for target in _LINK.findall(document.read_text(encoding="utf-8")) if "://" not in target]
    assert [target for target in targets if not (document.parent / target).exists()] == []


@pytest.mark.parametrize("raw", sorted([*MEASUREMENTS.glob("*.json"), *MEASUREMENTS.glob("*.yaml")]), ids=lambda raw: raw.name)
def test_a_raw_file_is_named_beside_the_command_that_makes_it(raw: Path) -> None:
    naming = [section for document in DOCUMENTS for section in sections(document) if re.search(rf"\b{re.escape(raw.name)}\b", section)]
    assert naming, f"no document names {raw.name}"
    assert any(_COMMAND.search(section) for section in naming), f"no command beside {raw.name}"
    if raw.suffix == ".json":
        assert json.loads(raw.read_text(encoding="utf-8"))


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: str(document.relative_to(ROOT)))
def test_a_file_that_a_command_writes_is_there(document: Path) -> None:
    """Commands of documents write into docs/measurements what is kept there."""
    written = re.findall(r"--(?:json|plot|report) (docs/measurements/\S+?)[`)\s]", document.read_text(encoding="utf-8"))
    assert [path for path in written if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("picture", sorted(MEASUREMENTS.glob("*.png")), ids=lambda picture: picture.name)
def test_a_picture_is_shown_somewhere(picture: Path) -> None:
    assert any(f"{picture.name})" in document.read_text(encoding="utf-8") for document in DOCUMENTS)
