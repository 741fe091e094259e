"""Commands in README.md, the pages and the docstrings print the shown output, on the stated number of ranks."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import click
import pytest
from documented import RUN, Block, blocks, commands, inline_code, same_output
from jobs import needs_mpiexec, python, run
from processes import folder_of_all
from reader import CHECKOUT, Jobs, Reader
from tiers import thorough

from pdgemm.tools.cli.commands import COMMANDS, cli

PAGES = sorted(
    [
        CHECKOUT / "README.md",
        CHECKOUT / "CONTRIBUTING.md",
        CHECKOUT / "slurm/README.md",
        *CHECKOUT.glob("docs/**/*.md"),
    ],
    key=lambda page: ("import torch" in page.read_text(), page),  # the jobs of few processes of pytest-xdist import it
)


# by default not run here: tests/examples runs its programs, and each rank loads scikit-learn for 2 s
GALLERY = CHECKOUT / "docs/examples/README.md"
# the first words of commands
STARTS = {"pdgemm", "python", "mpirun", "mpiexec", "srun", "nsys", "time", "scripts/hosts.sh"}


def of_pages(long: Sequence[Path] = ()) -> list[object]:
    """Return parameters for all pages; those in `long` run only with --all."""
    return [
        pytest.param(page, id=str(page.relative_to(CHECKOUT)), marks=[thorough] if page in long else [])
        for page in PAGES
    ]


@pytest.fixture(scope="session")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Jobs]:
    started = Jobs(tmp_path_factory.mktemp("jobs"))
    yield started
    started.end()


@needs_mpiexec
@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", of_pages([GALLERY]))
def test_page(page: Path, jobs: Jobs, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    reader = Reader(tmp_path, jobs)
    for block in blocks(page):
        if block.language in RUN and "not run" not in block.marks:
            try:
                reader.type(block)
            except AssertionError as error:
                raise AssertionError(f"{page.name}, line {block.line}: {error}") from None
    for name in reader.written:  # two pages must not write the same file: users may follow several pages in one folder
        writers = folder_of_all(tmp_path_factory) / "written by pages" / name
        writers.mkdir(parents=True, exist_ok=True)
        (writers / page.name).touch()
        names = [x.name for x in writers.iterdir()]
        assert names == [page.name], f"{' and '.join(names)} all write {name}"


@pytest.mark.parametrize("page", of_pages())
def test_commands_of_unrun_blocks_exist(page: Path) -> None:
    found = [block for block in blocks(page) if block.language in RUN]
    shell = [text for block in found for text in scripts(block)]
    for text in shell:
        checked = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True, timeout=60, check=False)
        assert checked.returncode == 0, f"{text}\n{checked.stderr}"
        made = {*re.findall(r"> (\S+)", text)}
        for words in commands(text):
            check_command([word for word in words if word not in made], whole=True)
    for block in found:
        if block.language == "python" and not block.text.startswith(">>>"):
            ast.parse(block.text)
        if "file" in block.marks:
            assert any(block.marks["file"] in text for text in shell), f"{block.marks['file']} is not used"
    for text in inline_code(page):
        if text.startswith("pdgemm ") or " pdgemm " in text:
            for words in commands(text):
                check_command(words, whole=False)


def test_few_blocks_are_not_run() -> None:
    """Blocks that are not run are listed with `-s`, each with its reason."""
    found = [(page, block) for page in PAGES for block in blocks(page) if block.language in RUN]
    left_out = [(page, block) for page, block in found if "not run" in block.marks]
    for page, block in left_out:
        print(f"{page.relative_to(CHECKOUT)}:{block.line}: not run: {block.marks['not run']}")
    assert 2 * len(left_out) < len(found), f"{len(left_out)} of {len(found)} blocks are not run"


def scripts(block: Block) -> Iterator[str]:
    """Yield the shell commands of a block; of a Python block none."""
    if block.language != "python":
        yield from (command for command, _ in block.dialogue())


def check_command(words: list[str], whole: bool) -> None:
    """Check that scripts in a command exist, and that `pdgemm` has its command and options."""
    for word in words:
        if word.startswith(("scripts/", "slurm/", "docs/", "tests/")) and not set("*{") & set(word):
            assert (CHECKOUT / word.partition("::")[0]).exists(), f"there is no {word}"
    while words and re.fullmatch(r"\w+=.*", words[0], re.DOTALL):  # environment variables before a command
        words = words[1:]
    if not words or words[0] not in STARTS or "pdgemm" not in words[:-1]:
        return
    name, *arguments = words[words.index("pdgemm") + 1 :]
    if name.startswith("-") or name.isupper() or name.endswith(".py"):
        return
    assert name in COMMANDS, f"there is no command {name}: {words}"
    command = cli.get_command(click.Context(cli), name)
    assert command is not None
    try:
        if whole and "--check" not in arguments:  # which would compute its tables here
            command.make_context(name, arguments)
        else:
            command.make_parser(click.Context(command)).parse_args([word for word in arguments if word != "..."])
    except click.exceptions.Exit:  # --help
        pass
    except click.ClickException as wrong:
        raise AssertionError(f"{' '.join(words)}: {wrong.format_message()}") from None


@needs_mpiexec
@pytest.mark.parametrize("ranks", [1, 4])
def test_docstrings(ranks: int, tmp_path: Path) -> None:
    done = run(python(ranks, "-m", "mpi4py", CHECKOUT / "tests/helpers/docstring_examples.py"), cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(done.stdout.split()[0]) > 5, done.stdout


# -- faults of a page that the tests detect


SHELL = """
```bash
export NAME=x.txt; echo 1 >$NAME
```

```console
$ cat $NAME
1
$ for i in 1 2
> do echo $i; done
1
2
```

<!-- exit code: 3 -->
```bash
(exit 3)
true
```
"""

PYTHON = """
<!-- ranks: 2 -->
```python
from mpi4py import MPI

rank = MPI.COMM_WORLD.rank
```

<!-- ranks: 2 -->
```python
print(rank, MPI.COMM_WORLD.size)
```

```output
0 2
1 2
```

<!-- ranks: 2 -->
```python
>>> for i in range(2):
...     i
0
1
>>> rank
0
>>> [][1]
Traceback (most recent call last):
    ...
IndexError: list index out of range
```
"""


COMMANDS_ON_RANKS = """
```console
$ mpirun -n 2 pdgemm plan --shape 8,8,8 --ranks 4 --layouts ideal --algorithm cannon
C (8 x 8) := A (8 x 8) B on 4 ranks by cannon...
...
$ python -c 'print(1 + 1)'
2
```
"""


def test_occasional_lines_are_ignored(jobs: Jobs, tmp_path: Path) -> None:
    line = "multiply: 47% in 5.6 s, 92 GFLOP/s, 6.4 s left"
    reader = Reader(tmp_path, jobs)
    several = f"echo a; echo {line} >&2; echo '[warn] Epoll MOD(4) on fd 22' >&2; echo b"
    assert reader.shell(several) == (0, "a\nb\n")
    assert reader.shell("echo 'warning: 47% in'") == (0, "warning: 47% in\n")


def type_all(page: Path, jobs: Jobs) -> None:
    reader = Reader(page.parent, jobs)
    for block in blocks(page):
        reader.type(block)


@needs_mpiexec
@pytest.mark.parametrize(
    ("page", "change"),
    [
        (SHELL, None),
        (SHELL, ("echo 1", "echo 2")),
        (SHELL, ("export NAME", "NAME")),
        (SHELL, ("do echo", "do echo 1")),
        (SHELL, ("exit 3", "exit 0")),
        (SHELL, ("exit code: 3", "exit code: 4")),
        (PYTHON, None),
        (PYTHON, ("0 2\n1 2", "1 2\n0 2")),
        (PYTHON, (">>> rank\n0", ">>> rank\n1")),
        (PYTHON, ("IndexError", "KeyError")),
        (PYTHON, ("```output\n0 2\n1 2\n```", "")),
        (PYTHON, ("rank = MPI", "rank = MPI.no")),
        (COMMANDS_ON_RANKS, None),
        (COMMANDS_ON_RANKS, ("C (8 x 8)", "C (9 x 8)")),
        (COMMANDS_ON_RANKS, ("--algorithm cannon", "--algorithm none")),
        (COMMANDS_ON_RANKS, ("1 + 1", "1 + 2")),
    ],
)
def test_reader(page: str, change: tuple[str, str] | None, jobs: Jobs, tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    path.write_text(page.replace(*change) if change else page)
    if change is None:
        type_all(path, jobs)
    else:
        assert path.read_text() != page
        with pytest.raises(AssertionError):
            type_all(path, jobs)


@pytest.mark.parametrize(
    "wrong",
    [
        "    a = 1\n",
        "```\na = 1\n```\n",
        "<!-- ranks: 2 -->\nText\n",
        "<!-- ranks: 2 -->\n",
        "```sh\necho\n```\n",
        "```python ranks=2\na = 1\n```\n",
        "<!-- not run: -->\n```bash\n```\n",
        "```output\n1\n```\n",
        "```console\n1\n```\n",
    ],
)
def test_pages_against_the_rules(wrong: str, tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text(wrong)
    with pytest.raises(ValueError, match="line"):
        [block.dialogue() for block in blocks(tmp_path / "page.md")]


def test_commands() -> None:
    text = "a 'b\nc' | d >e  # f\n\nx=1 \\\n  g; h \"i  j\" && k"
    found = [words for words in commands(text) if words]
    assert found == [["a", "b\nc"], ["d"], ["x=1", "g"], ["h", "i  j"], ["k"]]


@pytest.mark.parametrize(
    "words",
    [
        "pdgemm multipy a b",
        "pdgemm plan --shapes 1,1,1 --ranks 1",
        "pdgemm plan --shape 1,1,1",
        "A=1 B=2 pdgemm none",
        "mpirun -n 4 pdgemm plan --shape 8,8,8 --ranks 4 --mover none",
        "scripts/none.sh",
    ],
)
def test_commands_that_do_not_exist(words: str) -> None:
    with pytest.raises(AssertionError):
        check_command(words.split(), whole=True)


@pytest.mark.parametrize(
    ("shown", "printed", "same"),
    [
        ("a  b\n\n", "a b", True),
        ("a b", "a c", False),
        ("4 ranks", "5 ranks", False),
        ("1,024 words", "1,024 words", True),
        ("1.00000001", "1.0", True),
        ("1.001", "1.0", False),
        ("residual 8e-18", "residual 3e-17", True),
        ("residual 8e-18", "residual 3e-7", False),
        ("in 0.5 s", "in 12.25 s", True),
        ("in 0.5 s", "in 12.25 ms", True),
        ("in 0.5 s", "in 12.25 MiB", False),
        ("wait [s]  0.1  0.02", "wait [s]  1e-05 2", True),
        ("wait [ms]  0.1  0.02", "wait [ms]  1e-05 2", False),
        ("3.1 GFLOP/s, 50%", "11.2 GFLOP/s, 7%", True),
        ("17.3 MiB", "18 MiB", False),
        ("4 shapes", "5 shapes", False),
        ("a ... c", "a b b c", True),
        ("a\n...\nd", "a\nb\nc\nd", True),
        ("a\n...\nd", "a\nb\nc", False),
        ("a", "a\nb", False),
    ],
)
def test_same_output(shown: str, printed: str, same: bool) -> None:
    assert same_output(shown, printed) is same
