"""The documentation is built without a warning; all its pages, links, names and pictures exist."""

from __future__ import annotations

import re
import sys
import zlib
from pathlib import Path
from urllib.parse import unquote, urldefrag, urlsplit

import click
import pytest
from bs4 import BeautifulSoup
from jobs import run
from tiers import thorough

import pdgemm
from pdgemm import errors
from pdgemm.tools.cli.commands import COMMANDS, cli

pytestmark = thorough

CHECKOUT = Path(__file__).parents[2]
FIRST = "docs/index.html"
OUTSIDE = ("http:", "https:", "mailto:", "data:")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site."""
    folder = tmp_path_factory.mktemp("site")
    words = ["-q", "-W", "--keep-going", "-b", "html", "-c", "docs", "-d", folder / "trees", ".", folder / "html"]
    done = run([sys.executable, "-m", "sphinx", *words], cwd=CHECKOUT, timeout=300)
    assert not done.returncode and not done.stderr, done.stderr
    return folder / "html"


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[str, BeautifulSoup]:
    found = sorted(path for path in site.rglob("*.html") if "_static" not in path.parts)
    return {str(path.relative_to(site)): BeautifulSoup(path.read_text(), "html.parser") for path in found}


def targets(page: BeautifulSoup) -> list[str]:
    """Return the links and images of a page, external or internal."""
    return [str(tag.get(name)) for tag in page.find_all(True) for name in ("href", "src") if tag.get(name)]


@pytest.mark.timeout(400)
def test_links(site: Path, pages: dict[str, BeautifulSoup]) -> None:
    """Every link resolves, and every page can be reached."""
    anchors = {name: {tag["id"] for tag in page.find_all(id=True)} for name, page in pages.items()}
    reached, follow, broken = {FIRST}, [FIRST], []
    while follow:
        name = follow.pop()
        for link in targets(pages[name]):
            if link.startswith(OUTSIDE):
                continue
            place, anchor = urldefrag(link)
            place = unquote(urlsplit(place).path)
            target = (site / name).parent / place if place else site / name
            if not target.exists():
                broken.append((name, link))
                continue
            to = str(target.resolve().relative_to(site.resolve()))
            if to in pages and anchor and anchor not in anchors[to]:
                broken.append((name, link))
            if to in pages and to not in reached:
                reached.add(to)
                follow.append(to)
    assert not broken
    assert set(pages) - reached <= {"index.html", "search.html", "genindex.html", "py-modindex.html"}
    assert f"url={FIRST}" in (site / "index.html").read_text()


@pytest.mark.timeout(400)
def test_nothing_is_fetched(pages: dict[str, BeautifulSoup], site: Path) -> None:
    """Pages load no file from the network, also for the search."""
    for name, page in pages.items():
        loaded = [str(tag.get("src") or tag.get("href")) for tag in page.find_all(["script", "link", "img", "iframe"])]
        assert not [x for x in loaded if x.startswith(("http:", "https:", "//"))], name
    assert "lookahead" in (site / "searchindex.js").read_text()


@pytest.mark.timeout(400)
def test_every_public_name_is_documented(site: Path) -> None:
    *_, packed = (site / "objects.inv").read_bytes().split(b"\n", 4)  # packed data after four lines of comments
    objects = {line.split()[0] for line in zlib.decompress(packed).decode().splitlines()}
    wanted = {f"pdgemm.{name}" for name in pdgemm.__all__} | {"pdgemm.io.hdf5.load", "pdgemm.io.hdf5.save"}
    wanted |= {f"pdgemm.errors.{name}" for name in vars(errors) if name.endswith("Error") and name != "PdgemmError"}
    wanted |= {f"pdgemm.DistMatrix.{name}" for name in ("T", "sum", "redistribute", "from_local", "argmax")}
    assert not wanted - objects


@pytest.mark.timeout(400)
def test_every_command_is_documented(pages: dict[str, BeautifulSoup]) -> None:
    text = pages["docs/reference/command-line.html"].get_text()
    for name in COMMANDS:
        command = cli.get_command(click.Context(cli), name)
        assert command is not None
        for parameter in command.params:
            shown = not getattr(parameter, "hidden", False)
            assert not shown or all(option in text for option in parameter.opts if option.startswith("--")), name


@pytest.mark.timeout(400)
def test_pictures_have_words(pages: dict[str, BeautifulSoup]) -> None:
    shown = [image for page in pages.values() for image in page.select("article img") if "_images" in str(image["src"])]
    assert len(shown) >= 5
    assert not [image for image in shown if len(str(image.get("alt") or "")) < 20]


def test_environment_variables() -> None:
    """The table of environment variables has exactly the variables that the sources name."""
    folders = [CHECKOUT / name for name in ("pdgemm", "grids", "io", "slurm")]
    sources = [path for folder in folders for path in folder.rglob("*") if path.suffix in (".py", ".sh", ".sbatch")]
    sources += CHECKOUT.glob("scripts/**/*.sh")
    named = {name for path in sources for name in re.findall(r"PDGEMM_[A-Z_]*[A-Z]", path.read_text())}
    table = (CHECKOUT / "docs/reference/environment.md").read_text()
    assert set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == named
