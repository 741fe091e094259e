# shellcheck shell=bash
# Source this (bash, zsh or sh; from anywhere):   . scripts/env.sh
# Then `mpirun -n 4 pdgemm ...` and `mpirun -n 4 python -m pdgemm script.py` work, as root too.
# Variables that you have set are not changed.  PDGEMM_VENV names another virtual environment.

if [ -n "${BASH_SOURCE:-}" ]; then
    _pdgemm_here=$BASH_SOURCE
elif [ -n "${ZSH_VERSION:-}" ]; then
    eval '_pdgemm_here=${(%):-%x}'
else    # a plain sh has no variable with the name of a sourced file, but the file is open
    read -r _pdgemm_pid _pdgemm_rest </proc/self/stat
    for _pdgemm_fd in /proc/"$_pdgemm_pid"/fd/*; do
        case $(readlink "$_pdgemm_fd") in
            */scripts/env.sh) _pdgemm_here=$(readlink "$_pdgemm_fd") ;;
        esac
    done
fi
_pdgemm_root=$(CDPATH='' cd -P -- "$(dirname -- "${_pdgemm_here:-scripts/env.sh}")/.." && pwd)

case ${PDGEMM_VENV:-.venv} in
    /*) _pdgemm_venv=$PDGEMM_VENV ;;
    *) _pdgemm_venv=$_pdgemm_root/${PDGEMM_VENV:-.venv} ;;
esac

# On several nodes of a cluster, the site's settings of network, binding and mapping are not changed.
_pdgemm_nodes=${SLURM_JOB_NUM_NODES:-${SLURM_NNODES:-1}}
if [ -r "${PBS_NODEFILE:-}" ]; then
    _pdgemm_nodes=$(sort -u "$PBS_NODEFILE" | grep -c .)
elif [ -n "${LSB_MCPU_HOSTS:-}" ]; then     # LSF: "node1 8 node2 8"
    _pdgemm_nodes=$(($(printf '%s' "$LSB_MCPU_HOSTS" | wc -w) / 2))
fi

if [ -r "$_pdgemm_venv/bin/activate" ]; then
    . "$_pdgemm_venv/bin/activate"

    if [ "$(id -u)" = 0 ]; then
        export OMPI_ALLOW_RUN_AS_ROOT="${OMPI_ALLOW_RUN_AS_ROOT-1}"
        export OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="${OMPI_ALLOW_RUN_AS_ROOT_CONFIRM-1}"
        export PRTE_ALLOW_RUN_AS_ROOT="${PRTE_ALLOW_RUN_AS_ROOT-1}"
        export PRTE_ALLOW_RUN_AS_ROOT_CONFIRM="${PRTE_ALLOW_RUN_AS_ROOT_CONFIRM-1}"
    fi

    # Open MPI 4: mpirun prints no lines about a command that ends with an error; the exit code is not changed.
    # It also prints nothing about a program that does not exist; 0 turns its lines on again.
    export OMPI_MCA_orte_execute_quiet="${OMPI_MCA_orte_execute_quiet-1}"

    if [ "$_pdgemm_nodes" -le 1 ]; then
        # Allow more ranks than cores, and bind no rank to a core: in Open MPI 4, and in Open MPI 5.
        export OMPI_MCA_rmaps_base_oversubscribe="${OMPI_MCA_rmaps_base_oversubscribe-1}"
        export OMPI_MCA_hwloc_base_binding_policy="${OMPI_MCA_hwloc_base_binding_policy-none}"
        export PRTE_MCA_rmaps_default_mapping_policy="${PRTE_MCA_rmaps_default_mapping_policy-:oversubscribe}"
        export PRTE_MCA_hwloc_default_binding_policy="${PRTE_MCA_hwloc_default_binding_policy-none}"
        # One machine: do not search for networks at the start ("ofi" sleeps for a second if it finds none), and let a
        # waiting rank yield its core.
        export OMPI_MCA_pml="${OMPI_MCA_pml-ob1}"
        export OMPI_MCA_btl="${OMPI_MCA_btl-^ofi}"
        export OMPI_MCA_osc="${OMPI_MCA_osc-^ucx}"
        export OMPI_MCA_mpi_yield_when_idle="${OMPI_MCA_mpi_yield_when_idle-1}"
    fi

    # Open MPI 4: its default MPI-IO is ten times slower than ROMIO on compressed HDF5 data.
    case $(mpirun --version 2>/dev/null)${OMPI_MCA_io-} in
        *"(Open MPI) 4."*) export OMPI_MCA_io="${OMPI_MCA_io-romio321}" ;;
        *romio321) unset OMPI_MCA_io ;;     # set by an Open MPI 4 environment before; other versions do not have it
    esac
    unset _pdgemm_here _pdgemm_root _pdgemm_venv _pdgemm_nodes _pdgemm_pid _pdgemm_rest _pdgemm_fd
else
    echo "env.sh: $_pdgemm_venv is missing; run $_pdgemm_root/scripts/setup.sh first" >&2
    unset _pdgemm_here _pdgemm_root _pdgemm_venv _pdgemm_nodes _pdgemm_pid _pdgemm_rest _pdgemm_fd
    return 1
fi
