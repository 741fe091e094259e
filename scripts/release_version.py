"""Write a version and today's date to all files of a checkout that contain them: for scripts/release.sh.

    python scripts/release_version.py TREE VERSION

Exit codes: 0; 1 if nothing was changed, for the printed reason.
"""

from __future__ import annotations

import re
import sys
import tomllib
from datetime import date
from pathlib import Path

from packaging.version import Version


def write(tree: Path, version: str, today: date) -> None:
    """Change all files, or none.   Raises ValueError if a file does not have the expected lines."""
    old = tomllib.loads((tree / "pyproject.toml").read_text())["project"]["version"]
    if Version(version) < Version(old):
        raise ValueError(f"{version} is before {old}")
    (recipe,) = (tree / "docs/sites/easybuild").glob("pdgemm-*.eb")
    changes = {
        tree / "pyproject.toml": (r'^version = "[^"]*"$', f'version = "{version}"'),
        tree / "CHANGELOG.md": (r"^## \S+ \(unreleased\)$", f"## {version} ({today})"),
        tree / "CITATION.cff": (r"^version: .*$(\ndate-released: .*$)?", f"version: {version}\ndate-released: {today}"),
        tree / "docs/sites/spack/package.py": (
            r'^    version\("[^"]*"(, sha256="\w*")?\)',
            f'    version("{version}")',
        ),
        recipe: (r"^version = '.*'$", f"version = '{version}'"),
    }
    texts = {}
    for path, (pattern, new) in changes.items():
        texts[path], times = re.subn(pattern, new, path.read_text(), flags=re.MULTILINE)
        if times != 1:
            raise ValueError(f"{path.relative_to(tree)} must have one line like {pattern!r}, and has {times}")
    for path, text in texts.items():
        path.write_text(text)
    recipe.rename(recipe.with_name(recipe.name.replace(old, version)))


if __name__ == "__main__":
    try:
        write(Path(sys.argv[1]), sys.argv[2], date.today())
    except ValueError as error:
        sys.exit(f"release_version.py: {error}")
