"""The code blocks of a Markdown page: their kinds, the output that they show, and the comparison of two outputs.

A comment above a block marks it: `<!-- ranks: 2 -->`, `<!-- file: product.py -->`,
`<!-- not run: it needs Slurm -->`, `<!-- exit code: 2 -->`; CONTRIBUTING.md has the rules for authors.

To write the Python blocks of a page as one program: python tests/helpers/documented.py docs/PAGE.md > PROGRAM.py
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from markdown_it import MarkdownIt

RUN = {"bash", "console", "python"}
OTHER_NAMES = {"sh", "shell", "zsh", "py", "python3", "pycon", "doctest", "shell-session", "{code-block}", "{code}"}
MARKS = {"ranks", "file", "not run", "exit code"}
RANKS = 4


@dataclass
class Block:
    """A fenced block, its line in the page, and the marks of the comment above it."""

    language: str
    text: str
    line: int
    marks: dict[str, str] = field(default_factory=dict)
    output: str | None = None  # the text of the `output` block that follows

    @property
    def ranks(self) -> int:
        return int(self.marks.get("ranks", RANKS))

    @property
    def exit_code(self) -> int:
        return int(self.marks.get("exit code", 0))

    def dialogue(self) -> list[tuple[str, str | None]]:
        """Return (command, shown output or None) for each command of a console block, or one pair for another block."""
        if self.language != "console":
            return [(self.text, self.output)]
        found: list[tuple[str, str | None]] = []
        for line in self.text.splitlines():
            if line.startswith("$ "):
                found.append((line[2:], None))
            elif found and found[-1][1] is None and line.startswith("> "):
                found[-1] = (f"{found[-1][0]}\n{line[2:]}", None)
            elif not found:
                raise ValueError(f"line {self.line}: a console block begins with '$ ', not with {line!r}")
            else:
                found[-1] = (found[-1][0], f"{found[-1][1] or ''}{line}\n")
        return found


def blocks(page: Path) -> list[Block]:
    """Return the blocks of a page; raise ValueError at an invalid block or mark."""
    found: list[Block] = []
    marks: dict[str, str] = {}
    tokens = MarkdownIt("commonmark").enable("table").parse(page.read_text())
    for place, token in enumerate(tokens):
        line = (token.map or [0])[0] + 1
        if token.type == "code_block":
            raise ValueError(f"line {line}: code is indented; fence it, with its language: {token.content!r}")
        if token.type == "html_block" and token.content.startswith("<!--"):
            for comment in token.content.strip().splitlines():
                marks |= _mark(comment, line)
            if marks and not {x.type for x in tokens[place + 1 : place + 2]} & {"fence", "html_block"}:
                raise ValueError(f"line {line}: no block follows {token.content!r}")
        if token.type != "fence":
            continue
        language, *others = token.info.split() or [""]
        if not language or language in OTHER_NAMES or (others and language in {*RUN, "output"}):
            raise ValueError(f"line {line}: {token.info!r} is not one of {sorted(RUN)}, output or another language")
        if language == "output":
            if not found or found[-1].output is not None or found[-1].language not in RUN:
                raise ValueError(f"line {line}: there is no block before it whose output this is")
            found[-1].output = token.content
        else:
            found.append(Block(language, token.content, line, marks))
        marks = {}
    return found


def program(page: Path) -> str:
    """Return the Python blocks as one text; each line has the number that it has in the page."""
    lines = list[str]()
    for block in blocks(page):
        if block.language == "python":
            lines += [""] * (block.line - len(lines)) + block.text.splitlines()
    return "\n".join(lines) + "\n"


def _mark(comment: str, line: int) -> dict[str, str]:
    """Return the mark in a comment; None if the comment is for readers of the source."""
    key, _, value = comment.strip().removeprefix("<!--").removesuffix("-->").partition(":")
    if key.strip() not in MARKS:
        return {}
    if not value.strip():
        raise ValueError(f"line {line}: the mark {key.strip()!r} has no value")
    return {key.strip(): value.strip()}


def inline_code(page: Path) -> Iterator[str]:
    """Yield the inline code of sentences and tables."""
    for token in MarkdownIt("commonmark").enable("table").parse(page.read_text()):
        for child in token.children or []:
            if child.type == "code_inline":
                yield child.content


def commands(text: str) -> Iterator[list[str]]:
    """Yield the words of each simple command of a shell script, without redirections."""
    pending = ""
    for line in text.replace("\\\n", " ").splitlines():
        pending += line
        lexer = shlex.shlex(pending, posix=True, punctuation_chars="|&;<>()")
        lexer.whitespace_split = True
        try:
            all_words = list(lexer)
        except ValueError:  # an open quotation: it may end in the next line
            pending += "\n"
            continue
        pending = ""
        words: list[str] = []
        skip = False
        for word in all_words:
            if word[0] in "|&;()":
                yield words
                words = []
            elif word[0] in "<>":
                skip = True
            elif skip:
                skip = False
            else:
                words.append(word)
        yield words


# -- outputs

_NUMBER = re.compile(r"\d+(?:,\d{3})*(?:\.\d+)?(?:e[+-]?\d+)?")
_UNITS = (  # units of values that differ from run to run; in a printed value any unit of the same pattern is accepted
    r"(?:s|ms|us|µs|min|seconds?|milliseconds?|microseconds?|minutes?)",
    r"(?:[kMGT]?FLOP/s|[KMGT]i?B/s|B/s)",
    r"(?:%)",
)
_MEASURED = [re.compile(rf"({_NUMBER.pattern})(\s*){unit}(?![\w/])") for unit in _UNITS]
ROUNDING = 1e-10
TOLERANCE = 1e-6


def same_output(shown: str, printed: str) -> bool:
    """Return whether outputs agree.  `...` matches any text, on a line by itself any lines; blanks are ignored.

    Seconds (also in a row that is marked [s]), operations or bytes per second, and percentages may
    differ; floating-point numbers by TOLERANCE, and by any factor if both are below ROUNDING; integers are equal.
    """
    return _same_lines(_lines(shown), _lines(printed))


def _lines(text: str) -> list[str]:
    return [" ".join(line.split()) for line in text.splitlines() if line.strip()]


def _same_lines(shown: list[str], printed: list[str]) -> bool:
    if not shown:
        return not printed
    if shown[0] == "...":
        return any(_same_lines(shown[1:], printed[skip:]) for skip in range(len(printed) + 1))
    return bool(printed) and _same_line(shown[0], printed[0]) and _same_lines(shown[1:], printed[1:])


def _same_line(shown: str, printed: str) -> bool:
    pattern, numbers, at = "", [], 0
    while at < len(shown):
        measured = next((found for unit in _MEASURED if (found := unit.match(shown, at))), None)
        number = _NUMBER.match(shown, at)
        if number and "[s]" in shown:  # a row whose numbers are seconds
            pattern += _NUMBER.pattern
            at = number.end()
        elif measured:
            unit = next(unit for unit, kind in zip(_UNITS, _MEASURED) if kind.match(shown, at))
            pattern += rf"{_NUMBER.pattern}{measured[2] and ' '}{unit}(?![\w/])"
            at = measured.end()
        elif number:
            pattern += f"({_NUMBER.pattern})"
            numbers.append(number[0])
            at = number.end()
        elif shown.startswith("...", at):
            pattern += ".*?"
            at += 3
        else:
            pattern += re.escape(shown[at])
            at += 1
    found = re.fullmatch(pattern, printed)
    return found is not None and all(map(_same_number, numbers, found.groups()))


def _same_number(shown: str, printed: str) -> bool:
    if re.fullmatch(r"[\d,]+", shown):
        return shown == printed
    wanted, got = float(shown.replace(",", "")), float(printed.replace(",", ""))
    return abs(wanted - got) <= TOLERANCE * wanted or max(wanted, got) < ROUNDING


if __name__ == "__main__":
    print(program(Path(sys.argv[1])), end="")
