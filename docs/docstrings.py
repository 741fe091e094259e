"""Convert the docstrings of the package, which are plain text, to reStructuredText.

A line `name : text`, with the more indented lines below it, becomes an entry of a definition list; text in single
backticks becomes code, or a link if it is a public name; an indented paragraph is shown unchanged; and characters with
a meaning in reStructuredText, as in |A|, are escaped.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import pdgemm

NAMES = frozenset(pdgemm.__all__)
_ENTRY = re.compile(r"(?P<name>[\w`\"*.(][^:]*?)\s+:\s+(?P<text>\S.*)")
_CHOICE = re.compile(r'(?P<name>"[^"]+"(?:, "[^"]+")*)\s{1,}(?P<text>\S.*;?)')
_BEGINNINGS = ("Raises ", "Returns ", "Cost", "Error:")  # a line that begins so starts a new paragraph
_CODE = re.compile(r"(``?)(.+?)\1", re.DOTALL)
_SPECIAL = re.compile(r"([\\*|_`])")


def converted(lines: list[str]) -> list[str]:
    """Return a docstring, whose first line is not indented, in reStructuredText."""
    made: list[str] = []
    literal = False
    for paragraph in _paragraphs(lines):
        indented = all(line.startswith(" ") for line in paragraph)
        if paragraph == ["::"]:
            continue
        if paragraph[0].startswith(">>>"):
            made += [*paragraph, ""]
        elif indented:
            made += [*([] if literal else ["::", ""]), *(f"    {line}" for line in paragraph), ""]
        else:
            made += [*_paragraph(paragraph), ""]
        literal = indented
    return made


def _paragraphs(lines: list[str]) -> Iterator[list[str]]:
    """Yield the paragraphs, which are separated by empty lines."""
    paragraph: list[str] = []
    for line in [*lines, ""]:
        if line.strip():
            paragraph.append(line.rstrip())
        elif paragraph:
            yield paragraph
            paragraph = []


def _paragraph(lines: list[str]) -> list[str]:
    """Return the entries and the text of a paragraph; a more indented line continues the line above it."""
    made: list[str] = []
    text: list[str] = []

    def end() -> None:
        if text:
            made.extend([inline("\n".join(text)), ""])
            text.clear()

    at = 0
    while at < len(lines):
        entry = _ENTRY.fullmatch(lines[at])
        below = at + 1
        while below < len(lines) and lines[below].startswith(" "):
            below += 1
        if entry and len(entry["name"]) < 60:
            end()
            made += [f"``{entry['name'].strip('`')}``", *_body([entry["text"], *lines[at + 1 : below]]), ""]
        else:
            if lines[at].startswith(_BEGINNINGS):
                end()
            text += [line.strip() for line in lines[at:below]]
        at = below
    end()
    return made[:-1]


def _body(lines: list[str]) -> list[str]:
    """Return the text of an entry; lines that begin with a quoted choice and two blanks become a list."""
    made: list[str] = []
    choices = [_CHOICE.fullmatch(line.strip()) if number else None for number, line in enumerate(lines)]
    if sum("  " in (choice[0] if choice else "") for choice in choices) > 1:
        text: list[str] = []
        for line, choice in zip(lines, choices):
            if choice:
                made += [*_indented(text), ""]
                text = [f"- ``{choice['name']}`` {choice['text'].strip()}"]
            else:
                text.append(("  " if text and text[0].startswith("- ") else "") + line.strip())
        return [*made, *_indented(text)]
    return _indented([line.strip() for line in lines])


def _indented(lines: list[str]) -> list[str]:
    return [f"    {line}" for line in inline("\n".join(lines)).split("\n")] if lines else []


def inline(text: str) -> str:
    """Return text with code as literals, and all other text escaped."""
    made, at = "", 0
    for code in _CODE.finditer(text):
        before, after = text[at : code.start()], text[code.end() : code.end() + 1]
        made += _plain(before) + ("" if before[-1:] in ("", " ", "\n", "(") else "\\ ")
        name = code[2].removeprefix("pdgemm.")
        made += f":py:obj:`{code[2]} <pdgemm.{name}>`" if name in NAMES else f"``{' '.join(code[2].split())}``"
        made += "" if after in " \n.,;:)?!" else "\\ "
        at = code.end()
    return made + _plain(text[at:])


def _plain(text: str) -> str:
    text = _SPECIAL.sub(r"\\\1", text).replace("::", ":\\:")
    return f"\\{text}" if text.startswith(".. ") else text


def hook(app: object, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """Convert a docstring in place, for autodoc."""
    lines[:] = converted(lines)
