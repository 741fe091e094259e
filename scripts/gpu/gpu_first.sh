#!/usr/bin/env bash
# The first hour on a machine with a GPU: tests correctness and measures speed there.  gpu_first.py has the steps.
#
#   scripts/gpu/gpu_first.sh [--wheels DIR] [--openmpi FILE.tar.gz] [OPTIONS of gpu_first.py]
#
# It needs python3 (3.11 or later) with cupy, and an MPI.  Missing packages (the dependencies in pyproject.toml, pytest,
# pytest-mpi, pytest-timeout and hypothesis) are installed from wheels in DIR.  Nothing is downloaded.
# --openmpi unpacks an Open MPI built for CUDA, and uses it instead of the MPI on the PATH.  If setup.sh has made a
# .venv, its Python is used.
set -euo pipefail
root=$(cd -P "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
. "$root/scripts/common.sh"
help_asked "$@"
wheels='' openmpi=''
while :; do
    case ${1:-} in
        --wheels) wheels=$(realpath "$2"); shift 2 ;;
        --openmpi) openmpi=$(realpath "$2"); shift 2 ;;
        *) break ;;
    esac
done

own=${PDGEMM_FIRST_HOUR:-$root/.first-hour}     # the folder of unpacked and compiled files
mkdir -p "$own"
if [ -r "$root/.venv/bin/activate" ]; then
    . "$root/scripts/env.sh"
fi
export PYTHONPATH=$own/site:$root${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
export CUPY_CACHE_DIR=${CUPY_CACHE_DIR:-$own/cupy}      # later steps reuse the compiled kernels
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
export PRTE_MCA_rmaps_default_mapping_policy="${PRTE_MCA_rmaps_default_mapping_policy-:oversubscribe}"
export PRTE_MCA_hwloc_default_binding_policy="${PRTE_MCA_hwloc_default_binding_policy-none}"
export OMPI_MCA_pml="${OMPI_MCA_pml-ob1}" OMPI_MCA_btl="${OMPI_MCA_btl-^ofi}" OMPI_MCA_osc="${OMPI_MCA_osc-^ucx}"

if [ -n "$openmpi" ]; then
    mkdir -p "$own/openmpi"
    tar -xzf "$openmpi" -C "$own/openmpi" --strip-components=1
    found=$(find "$own/openmpi" -path '*bin/mpiexec' | head -n 1)
    [ -n "$found" ] || { echo "gpu_first.sh: $openmpi has no bin/mpiexec" >&2; exit 1; }
    OPAL_PREFIX=$(dirname "$(dirname "$found")")
    export OPAL_PREFIX PRTE_PREFIX=$OPAL_PREFIX PMIX_PREFIX=$OPAL_PREFIX PATH=$OPAL_PREFIX/bin:$PATH
    export LD_LIBRARY_PATH=$OPAL_PREFIX/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
    export MPI4PY_LIBMPI=$OPAL_PREFIX/lib/libmpi.so.40
fi

python=$(command -v python || command -v python3)
case " $* " in *" --commands "* | *" --list "*) exec "$python" "$root/scripts/gpu/gpu_first.py" "$@" ;; esac
mapfile -t missing < <("$python" "$root/scripts/gpu/missing_packages.py" "$root/pyproject.toml")
if [ ${#missing[@]} -gt 0 ]; then
    [ -n "$wheels" ] || { echo "gpu_first.sh: ${missing[*]} missing; name a folder of wheels by --wheels" >&2; exit 1; }
    "$python" -m pip install --quiet --no-index --no-deps --upgrade --find-links "$wheels" --target "$own/site" \
        "${missing[@]}"     # --no-deps: with --target, pip ignores installed packages and would install them again
fi
exec "$python" "$root/scripts/gpu/gpu_first.py" "$@"
