"""What counts as text: anything that has a UTF-8 form."""

from __future__ import annotations


def check_unicode(text: str, field: str) -> None:
    """Raises ValueError naming ``field``, place and code point if ``text`` has a lone surrogate, which JSON can smuggle in."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        code_point = f"U+{ord(text[error.start]):04X}"
        raise ValueError(f"{field}: given lone surrogate {code_point} at character {error.start}, allowed: Unicode text") from error
