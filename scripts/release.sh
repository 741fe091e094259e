#!/usr/bin/env bash
# Makes a release: sets the version and the changelog, builds the sdist and the wheel, and tests both.  Uploads nothing.
#
#   scripts/release.sh [--dry-run] VERSION      e.g. 0.2.0
#
# The checkout must be clean, with an "unreleased" section in CHANGELOG.md.  VERSION and today's date are written to
# pyproject.toml, CHANGELOG.md, CITATION.cff and the recipes of docs/sites; the sdist and the wheel are built in dist/.
# Both are checked by twine and installed in separate fresh environments, in which a command, a product on 2 ranks and
# the tests of the package's contents run.  If all succeed, the version is committed and tagged, and the remaining steps
# are printed.  --dry-run does the same in a copy: it writes dist/, and changes nothing else.
set -euo pipefail
root=$(cd -P "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
. "$root/scripts/common.sh"
help_asked "$@"

dry=no
if [ "${1:-}" = --dry-run ]; then dry=yes; shift; fi
version=${1:-}
[[ $# = 1 && $version =~ ^[0-9]+\.[0-9]+\.[0-9]+((a|b|rc)[0-9]+)?$ ]] ||
    exit_code=2 die "usage: release.sh [--dry-run] VERSION (such as 0.2.0)"
cd "$root"
[ -z "$(git status --porcelain)" ] || die "the checkout has changes that are not committed"
! git rev-parse -q --verify "refs/tags/v$version" >/dev/null || die "there is a tag v$version already"
"$root/scripts/setup.sh" dev
. "$root/scripts/env.sh"

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
tree=$work/tree
git clone -q --no-hardlinks "$root" "$tree"
python "$root/scripts/release_version.py" "$tree" "$version"

quietly "building the sdist and the wheel of pdgemm $version" \
    python -m build --no-isolation --outdir "$work/dist" "$tree"
quietly "checking their descriptions" twine check --strict "$work"/dist/*
mpi=mpi
[ ! -e .venv/bin/mpichversion ] || mpi=mpich
for file in "$work"/dist/*; do
    name=${file##*/}
    fresh=$work/fresh-${name##*.}
    quietly "installing $name in a fresh environment" \
        bash -c "'$(find_python)' -m venv '$fresh' && '$fresh/bin/python' -m pip install -q '${file}[$mpi]'"
    quietly "trying it: pdgemm info, and a product on 2 ranks" bash -euc "
        cd '$fresh'
        export PDGEMM_VENV='$fresh'
        . '$root/scripts/env.sh'
        pdgemm --version | grep -F '$version'
        mpiexec -n 2 pdgemm info
        mpiexec -n 2 pdgemm generate --shape 300,200 trial.h5:/A
        mpiexec -n 2 pdgemm multiply trial.h5:/A trial.h5:/A --transb T -o product.h5:/C --verify"
done
quietly "running the tests of what is packaged" python -m pytest -q "$tree/tests/unit/test_packaging.py" \
    --rootdir "$tree" -c "$tree/pyproject.toml" -p no:cacheprovider

mkdir -p dist
cp "$work"/dist/* dist/
(cd dist && sha256sum "pdgemm-$version"*)
if [ $dry = yes ]; then
    say "dry run: this is what a release would change"
    git -C "$tree" --no-pager diff --stat
    exit 0
fi
git -C "$tree" add -A
git -C "$tree" diff --cached --binary HEAD | git apply --index
git commit -qm "pdgemm $version"
git tag -a "v$version" -m "pdgemm $version"
say "committed and tagged v$version; the remaining steps:
    git push origin HEAD v$version
    twine upload dist/pdgemm-$version*
    write the sha256 of the sdist to docs/sites/spack/package.py, and by eb --inject-checksums to docs/sites/easybuild
    begin the next version by a section \"(unreleased)\" at the top of CHANGELOG.md"
