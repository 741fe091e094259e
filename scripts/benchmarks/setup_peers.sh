#!/usr/bin/env bash
# Makes .venv-peers: pdgemm and its peers, for scripts/benchmarks/bench_peers.py and bench_linalg.py.
#
#   scripts/benchmarks/setup_peers.sh [PEER...]      some of pylops-mpi, dask, heat, scalapack, mkl; by default all
#
# A peer that cannot be installed is reported with the reason, and left out; the next run tries it again.
# ScaLAPACK is Debian's or Ubuntu's, on their Open MPI and OpenBLAS; mkl is MKL's wheel, on the same Open MPI.
#
# PDGEMM_TORCH=...   pip's name of the torch for heat (default: a build without CUDA; "torch" is PyPI's)
# PYTHON=...         the Python to use (3.11 or later)
set -euo pipefail
root=$(cd -P "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
venv=$root/.venv-peers
stamp=$venv/pdgemm-setup        # written when nothing was left out
. "$root/scripts/common.sh"
help_asked "$@"

peers='pylops-mpi dask heat scalapack mkl'
[ $# != 0 ] || set -- $peers
for peer; do
    case " $peers " in *" $peer "*) ;; *) die "$peer is not one of $peers" ;; esac
done
torch=${PDGEMM_TORCH:-torch==2.13.0+cpu}
drivers=$root/scripts/benchmarks/peers
this=$(cat "${BASH_SOURCE[0]}" "$drivers"/scalapack_* | sha256sum)

print=''
[ ! -r "$stamp" ] || read -r print <"$stamp"
if [ "$print" = "$(fingerprint "$this" "$torch" "$@")" ]; then exit 0; fi

lock
make_venv
rm -f "$stamp"
pip=("$venv/bin/python" -m pip --disable-pip-version-check)

install_pylops-mpi() { "${pip[@]}" install 'pylops-mpi>=0.8'; }
install_dask() { "${pip[@]}" install 'dask[array]'; }
install_heat() {
    # --no-deps: Heat also requires torchvision (for data sets) and older torches, which PyPI offers only with CUDA.
    "${pip[@]}" install "$torch" && "${pip[@]}" install --no-deps heat
}

# compile NAME SOURCE OPTION...: compiles a driver; the options name ScaLAPACK and other libraries.
compile() {
    local name=$1 source=$2
    shift 2
    mpicc.openmpi -O2 -o "$venv/bin/$name" "$drivers/$source" "$@" -lm -ldl
}
install_scalapack() {
    local packages=(libscalapack-openmpi-dev openmpi-bin libopenmpi-dev gcc libc6-dev libopenblas0-pthread)
    if ! dpkg -s "${packages[@]}" >/dev/null 2>&1; then
        can_apt || { echo "please run: sudo apt-get install ${packages[*]}" && return 1; }
        _apt_install "${packages[@]}" || return 1
    fi
    # The executable's pilaenv overrides the library's, by which PBLAS cuts products into blocks of 32.
    compile scalapack_gemm scalapack_gemm.c -lscalapack-openmpi &&
        compile scalapack_gemm_256 scalapack_gemm.c -DLOGICAL_BLOCK=256 -lscalapack-openmpi &&
        compile scalapack_linalg scalapack_linalg.c -lscalapack-openmpi
}
install_mkl() {
    command -v mpicc.openmpi >/dev/null || { echo "needs Debian's Open MPI" && return 1; }
    "${pip[@]}" install mkl &&
        compile scalapack_gemm_mkl scalapack_gemm.c "$venv"/lib/libmkl_{scalapack_lp64,intel_lp64,sequential,core,blacs_openmpi_lp64}.so.* \
            -Wl,--no-as-needed,-rpath,"$venv/lib"
}

quietly "installing pdgemm[mpi] into .venv-peers" "${pip[@]}" install -e "${root}[mpi]"
quietly "checking that mpiexec starts 2 ranks" check_ranks "$venv/bin/mpiexec"

# reason: prints the last line of the log that mentions an error, or else the last line.
reason() { { grep -i error "$log" || grep -v '^ *$' "$log"; } | tail -n 1; }

left_out=()
log=$(mktemp)
trap 'rm -f "$log"' EXIT
for peer; do
    say "installing $peer"
    "install_$peer" >"$log" 2>&1 </dev/null || left_out+=("$peer: $(reason)")
done
[ ${#left_out[@]} = 0 ] || printf 'left out: %s\n' "${left_out[@]}"
[ ${#left_out[@]} != 0 ] || fingerprint "$this" "$torch" "$@" >"$stamp"
say "now: PDGEMM_VENV=.venv-peers; . scripts/env.sh; python scripts/benchmarks/bench_peers.py, or bench_linalg.py"
