"""The program of a page of the documentation: its blocks of one language, one behind the other."""

from __future__ import annotations

import re
from pathlib import Path

_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def program(page: Path, language: str = "python") -> str:
    """Return the blocks as one text in which each line has the number that it has on the page."""
    text, lines = page.read_text(encoding="utf-8"), list[str]()
    for block in _BLOCK.finditer(text):
        if block[1] == language:
            begins = text.count("\n", 0, block.start(2))
            lines += [""] * (begins - len(lines)) + block[2].splitlines()
    return "\n".join(lines) + "\n"
