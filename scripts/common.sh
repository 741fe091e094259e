# shellcheck shell=bash
# Shared by the setup scripts; sourced by bash after `set -euo pipefail`, with $root and $venv set.

say() { printf '%s\n' "$*"; }
die() { printf '%s\n' "${0##*/}: $*" >&2; exit "${exit_code:-1}"; }

# help_asked "$@": if the first argument is -h or --help, prints the comment at the top of the script and exits.
help_asked() {
    case ${1:-} in
        -h | --help) sed -n '2,/^[^#]/s/^# \{0,1\}//p' "${BASH_SOURCE[1]}"; exit 0 ;;
    esac
}

# quietly TEXT COMMAND...: prints TEXT, and the command's output only if it fails.
quietly() {
    local what=$1 log status=0
    shift
    say "$what"
    log=$(mktemp)
    "$@" >"$log" 2>&1 </dev/null || status=$?
    if [ $status != 0 ]; then
        tail -n 60 "$log" >&2
        printf 'failed: %s\n' "$what" >&2
    fi
    rm -f "$log"
    return $status
}

can_apt() { [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; }

_apt_install() {
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -q && apt-get install -y -q --no-install-recommends "$@"
}

# apt_install PACKAGES...: installs by apt-get as root; otherwise prints the command and exits ($exit_code, default 1).
apt_install() {
    can_apt || die "please run: sudo apt-get install $*   (then $0 again)"
    quietly "apt-get install $*" _apt_install "$@"
}

# Prints the path of a Python >= 3.11, of $PYTHON if it is set; nothing if there is none.
find_python() {
    local name
    for name in ${PYTHON:-python3 python3.14 python3.13 python3.12 python3.11}; do
        "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || continue
        "$name" -c 'import sys; print(sys.executable)'
        return
    done
}

# Makes $venv if it does not exist, or makes it again if it was moved, is incomplete, or its Python
# does not exist any more.
make_venv() {
    local python
    if grep -qsF "$venv" "$venv/bin/activate" && "$venv/bin/python" -c '' 2>/dev/null; then
        "$venv/bin/python" -c 'import pip' 2>/dev/null || "$venv/bin/python" -m ensurepip >/dev/null
        return
    fi
    command -v "${PYTHON:-python3}" >/dev/null || apt_install python3 python3-venv
    python=$(find_python)
    [ -n "$python" ] || die "no Python >= 3.11 found; name one: PYTHON=/path/to/python3 $0"
    if ! "$python" -c 'import venv, ensurepip' 2>/dev/null; then
        apt_install "python$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')-venv"
    fi
    quietly "making ${venv##*/} with $("$python" -V)" "$python" -m venv --clear "$venv"
}

# Allows one setup at a time in a checkout, if the file system has locks.
lock() { exec 9<"$root"; flock 9 || true; }

# fingerprint WORDS...: prints a checksum that changes whenever an installation must be checked again.
fingerprint() {
    { cat "$root/pyproject.toml" "$root/setup.cfg"; "$venv/bin/python" -V; echo "$venv" "$@"; } 2>/dev/null |
        sha256sum | cut -d' ' -f1
}

# check_ranks LAUNCHER [PYTHON CODE]: fails if two ranks do not see each other, because the launcher belongs to another
# MPI than mpi4py's library.
check_ranks() {
    local out
    out=$(
        PDGEMM_VENV=$venv
        . "$root/scripts/env.sh"
        timeout 60 "$1" -n 2 python -m mpi4py -c "
from mpi4py import MPI
${2:-}
if MPI.COMM_WORLD.rank == 0:
    print('ranks', MPI.COMM_WORLD.size)" 2>&1
    ) || true
    printf '%s\n' "$out"
    [ "$(grep -ac '^ranks 2$' <<<"$out")" = 1 ]
}
