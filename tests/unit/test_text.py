"""Numbers as people read them."""

import ast
import math
from pathlib import Path

import pytest

from pdgemm.support import text as module
from pdgemm.support.text import counted_short, echo, in_bytes, in_rate, in_seconds, in_words, printable


def test_a_terminal_shows_names_and_does_not_obey_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert printable("a\x1b[2J\x9b1m\r\u202eb") == "a\\x1b[2J\\x9b1m\\r\\u202eb"
    assert printable("lines\nand\ttabs, Ä, 漢, 𝔸\udc80") == "lines\nand\ttabs, Ä, 漢, 𝔸\udc80"
    echo("x\x1b]0;title\x07")
    echo(["\x1b"], err=True)
    assert capsys.readouterr() == ("x\\x1b]0;title\\x07\n", "['\\x1b']\n")


def test_what_the_commands_print_is_printable() -> None:
    """By `echo`, or by a function that calls `printable`."""
    package = Path(module.__file__).parents[1]
    for path in {*package.rglob("*.py"), *(package / "io").rglob("*.py"), *(package / "grids").rglob("*.py")}:
        source = path.read_text()
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("click.echo", "print", "os.write"):
                of_user = path.name == "report.py"  # `Report.print()`, which the program of a user calls
                no_name = path.name == "failures.py" or ast.unparse(node).startswith("os.write(_tells")
                assert of_user or no_name or "printable" in source, f"{path}:{node.lineno}"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (3e-10, "0.30 ns"),
        (1.2e-5, "12 us"),
        (9.96e-6, "10 us"),  # rounding does not add a digit
        (3.4e-3, "3.4 ms"),
        (0.99996, "1.0 s"),  # what is rounded up to the next unit is written in it
        (1.2, "1.2 s"),
        (-1.2, "-1.2 s"),
        (84.4, "84 s"),
        (119.4, "119 s"),
        (1060, "18 min"),
        (7200, "2.0 h"),
        (5.5 * 3600, "5.5 h"),
        (3 * 86400, "3.0 days"),
        (4e9, "46296 days"),
        (math.inf, "inf s"),
    ],
)
def test_seconds(seconds, text):
    assert in_seconds(seconds) == text


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (0, "0 words"),
        (1, "1 word"),
        (0.6, "1 word"),
        (3072, "3072 words"),
        (9999.4, "9999 words"),
        (9999.6, "10.0 k words"),
        (57_472, "57.5 k words"),
        (999_960, "1.00 M words"),
        (604e6, "604 M words"),
        (6.04e9, "6.04 G words"),
        (3e21, "3000 E words"),
    ],
)
def test_words(words, text):
    assert in_words(words) == text


def test_other_nouns():
    assert counted_short(12_345_678, "message") == "12.3 M messages" and counted_short(1, "message") == "1 message"


@pytest.mark.parametrize(
    ("rate", "text"),
    [
        (0, "0 FLOP/s"),
        (0.5, "0.50 FLOP/s"),
        (950, "950 FLOP/s"),
        (2_000, "2.0 kFLOP/s"),
        (3.1e6, "3.1 MFLOP/s"),
        (84e9, "84 GFLOP/s"),
        (999.96e9, "1.0 TFLOP/s"),
        (1.1e18, "1.1 EFLOP/s"),
    ],
)
def test_rates(rate, text):
    assert in_rate(rate) == text


def test_what_is_no_number_is_shown_as_it_is():
    assert [f(math.nan) for f in (in_seconds, in_words, in_rate)] == ["nan s", "nan words", "nan FLOP/s"]


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (5 * 2**30, "5.0 GiB"), (2**50, "1024.0 TiB")]
)
def test_bytes(size, text):
    assert in_bytes(size) == text
