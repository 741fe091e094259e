"""The program of a page of the documentation: its blocks of one language, one behind the other.

python tests/helpers/page_blocks.py docs/PAGE.md > PROGRAM.py
"""

from __future__ import annotations

import re
import sys
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


if __name__ == "__main__":
    print(program(Path(sys.argv[1])), end="")
