#!/usr/bin/env bash
# Installs the requirements, builds the documentation into build/docs, and prints the path of its first page.
#
#   scripts/docs.sh             any warning is an error
#   scripts/docs.sh --check     also runs all code in pages and docstrings, and checks pages and links
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"
help_asked "$@"
cd -P "$(dirname "${BASH_SOURCE[0]}")/.."

check=no
case ${1:-} in
    '') ;;
    --check) check=yes ;;
    *) echo "docs.sh: the only option is --check, not '$1'" >&2; exit 2 ;;
esac
if [ $check = yes ]; then scripts/setup.sh dev; else scripts/setup.sh docs; fi
. scripts/env.sh
python -m sphinx -q -W --keep-going -b html -c docs -d build/docs-trees . build/docs
[ $check = no ] || python -m pytest -q --all -m 'not mpi' tests/docs
printf '%s\n' "$PWD/build/docs/index.html"
