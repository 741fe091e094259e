#!/usr/bin/env bash
# The main job on real input: multiply matrices that live in HDF5 files, on 4 ranks.
# Sets up what it needs; results stay in demo-data/.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

"$root/scripts/setup.sh" demo
. "$root/scripts/env.sh"

mkdir -p "$root/demo-data" && cd "$root/demo-data"
run() { printf '\n$ %s\n' "$*"; "$@"; }

run mpirun -n 4 pdgemm info
run python "$root/scripts/demo_digits.py" write digits.h5
run mpirun -n 4 pdgemm multiply digits.h5:/X digits.h5:/X --transb T -o similarity.h5:/S --block 64 --verify
run mpirun -n 4 pdgemm multiply digits.h5:/centred digits.h5:/centred --transa T --alpha 1/1796 -o covariance.h5:/C --verify
run python "$root/scripts/demo_digits.py" check .
