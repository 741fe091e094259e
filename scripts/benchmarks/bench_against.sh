#!/usr/bin/env bash
# Runs the benchmarks of this tree and of another commit in turns, on 1 and 2 ranks, to compare their speed.
#
#   scripts/benchmarks/bench_against.sh COMMIT [TURNS]     3 turns, about 10 minutes; both run in this tree's .venv
#
# Both use the benchmarks of this tree.  These import documented names only, so that they also run with commits whose
# modules have other names.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/../common.sh"
help_asked "$@"
cd -P "$(dirname "${BASH_SOURCE[0]}")/../.."
commit=$(git rev-parse --short "${1:?usage: bench_against.sh COMMIT [TURNS]}^{commit}")
. scripts/env.sh
export OMP_NUM_THREADS=1
other=$(mktemp -d)
trap 'git worktree remove --force "$other"' EXIT
git worktree add --quiet --detach "$other" "$commit"

for turn in $(seq "${2:-3}"); do
    for tree in "$other" "$PWD"; do
        printf '\n== turn %s, %s\n' "$turn" "$([ "$tree" = "$PWD" ] && echo 'this tree' || echo "$commit")"
        export PYTHONPATH=$tree
        mpiexec -n 1 python scripts/benchmarks/bench_products.py product --shapes 512,2048 --repeats 5
        mpiexec -n 2 python scripts/benchmarks/bench_products.py product --shapes 512,2048 --repeats 5
        mpiexec -n 2 python scripts/benchmarks/bench_products.py layouts --shapes 1024 --repeats 5
        mpiexec -n 2 python scripts/benchmarks/bench_matrices.py redistribute --size 2048 --repeats 5
        mpiexec -n 1 python scripts/benchmarks/bench_products.py overhead --repeats 5
        mpiexec -n 2 python scripts/benchmarks/bench_products.py overhead --repeats 5
    done
done
