#!/usr/bin/env bash
# A demonstration on 4 ranks: a product of matrices in HDF5 files, and two of the examples of docs/examples.
# Installs the requirements first; the results are in demo-data/.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
. "$root/scripts/common.sh"
help_asked "$@"
[ $# = 0 ] || exit_code=2 die "takes no arguments, not '$*'"

"$root/scripts/setup.sh" demo
. "$root/scripts/env.sh"

mkdir -p "$root/demo-data" && cd "$root/demo-data"
run() { printf '\n$ %s\n' "$*"; "$@"; }

run mpirun -n 4 pdgemm info
run mpirun -n 4 python -m pdgemm "$root/docs/examples/pca.py"
run mpirun -n 4 pdgemm multiply digits.h5:/X digits.h5:/X --transb T -o similarity.h5:/S --block 64 --verify
run python "$root/docs/examples/nearest_neighbours.py"
printf '\nwrote the pictures demo-data/pca.png and demo-data/nearest_neighbours.png\n'
