# shellcheck shell=bash disable=SC2119,SC2120,SC2317 # lost() is called by a trap
# The functions of the job scripts, which source this file with their name.  You need not edit it; the settings of a
# site are in site.sh.
#
#   environment     reads and checks the site's settings, and adds the programs to PATH
#   check_ranks     checks that the launcher starts ranks that see each other
#   run, launch     run a step that a signal can end
#   multiply        computes C := A B from file to file
#   program         runs a command of pdgemm, or a Python program
#   train           runs a Python program that continues from its saved state
# The job ends with pdgemm's exit codes: 0 done, 1 a result is wrong, 2 bad input; or 143 after SIGTERM.
set -euo pipefail
name=$1

say() { printf '%s\n' "$name: $*"; }
die() { printf '%s\n' "$name: error: $*" >&2 && exit 2; }

# ---------------------------------------------------------------- the batch system
# Slurm, PBS and LSF describe an allocation in different variables; these have the same meaning under each:
#   job, hosts     the number of the job and the names of its nodes, for messages
#   nodes, ranks   the numbers of nodes and of ranks
#   task           the number of this task of a job array; empty in other jobs
allocation() {
    local mcpu
    job='' hosts=$(hostname -s) nodes=1 ranks=1 task=''
    if [ -n "${SLURM_JOB_ID:-}" ]; then
        job=$SLURM_JOB_ID hosts=${SLURM_JOB_NODELIST:-$hosts} nodes=${SLURM_JOB_NUM_NODES:-1}
        ranks=${SLURM_NTASKS:-$((nodes * ${SLURM_NTASKS_PER_NODE:-1}))}
        task=${SLURM_ARRAY_TASK_ID:-}
    elif [ -r "${PBS_NODEFILE:-}" ]; then   # a line for each rank, with the name of its node
        job=${PBS_JOBID:-} hosts=$(sort -u "$PBS_NODEFILE" | paste -sd,)
        nodes=$(sort -u "$PBS_NODEFILE" | grep -c .) ranks=$(grep -c . "$PBS_NODEFILE")
        task=${PBS_ARRAY_INDEX:-${PBS_ARRAYID:-}}
        cd "${PBS_O_WORKDIR:-.}" || die "PBS_O_WORKDIR=$PBS_O_WORKDIR: the job cannot enter this folder"
    elif [ -n "${LSB_JOBID:-}" ]; then
        read -ra mcpu <<<"${LSB_MCPU_HOSTS:-$hosts 1}"      # "node1 8 node2 8"
        job=$LSB_JOBID hosts=$(printf '%s %s\n' "${mcpu[@]}" | cut -d' ' -f1 | paste -sd,)
        nodes=$((${#mcpu[@]} / 2)) ranks=${LSB_DJOB_NUMPROC:-1}
        task=${LSB_JOBINDEX:-} task=${task#0}               # 0 outside of an array
    fi
}
allocation

# A user's site file is outside of the checkout, so that no update of pdgemm changes it.
site=${PDGEMM_SITE:-${XDG_CONFIG_HOME:-${HOME:-}/.config}/pdgemm/site.sh}
[ -n "${PDGEMM_SITE:-}" ] || [ -r "$site" ] || site=$here/site.sh

# ---------------------------------------------------------------- steps and signals
step='' started=''  # the process that runs in the background, and the first word of its command
lost() { :; }       # prints what is lost if the job ends now; scripts redefine it

# end_step SIGNAL SECONDS: sends a signal to the running step, and waits for its end.
end_step() {
    kill "-$1" "$step" 2>/dev/null || return 0
    for ((i = 0; i < $2 * 10; i++)); do
        kill -0 "$step" 2>/dev/null || return 0
        sleep 0.1
    done
}

# end_job REASON SECONDS: gives the step SECONDS to end by itself, and then kills it.  (Bash handles signals while it
# waits for a step, but not while a program runs in the foreground.)
end_job() {
    trap '' TERM USR1
    say "$1"
    if [ -n "$step" ]; then
        # Launchers forward SIGUSR1 to pdgemm's ranks, which treat it like SIGTERM; at SIGTERM they kill the ranks.
        [ "$started" != launch ] || end_step USR1 "$2"
        end_step TERM 16
        end_step KILL 1
    fi
    lost
}

# Called at scancel, which kills the job after 30 seconds, and by --signal=B:TERM@60 before the time limit.
on_term() {
    end_job "SIGTERM: the time limit is near, or the job was cancelled" 8
    exit 143
}
trap on_term TERM

# Called by --signal=B:USR1@120 before the time limit.  A product with checkpoints has time to save one.  The job is
# queued again and continues, as training does, unless this run has saved nothing: then it would be queued for ever.
on_limit() {
    local seconds=8
    [ -z "${CHECKPOINT:-}" ] || seconds=95
    end_job "SIGUSR1: the time limit is near" $seconds
    if saved; then
        say "the job is queued again, and goes on from ${STATE:-the checkpoint}"
        scontrol requeue "$SLURM_JOB_ID" || say "it cannot be queued again; the same sbatch command goes on" >&2
        sleep 20    # until Slurm ends it
    fi
    exit 143
}
saved() { false; }  # succeeds if the job has saved a checkpoint; multiply and train redefine it
trap on_limit USR1

# run COMMAND...: runs a command in the background, waits for it, and returns its exit code.
run() {
    local status=0
    started=$1
    "$@" &
    step=$!
    wait "$step" || status=$?
    step=''
    return $status
}

# launcher RANKS: sets $words to the command that starts RANKS ranks.
launcher() { read -ra words <<<"${PDGEMM_LAUNCH//'{ranks}'/$1}"; }

# launch RANKS COMMAND...: runs a command on RANKS ranks; only as `run launch ...`, because it replaces the shell.
launch() {
    local words
    launcher "$1"
    shift
    exec "${words[@]}" "$@"
}

# into FILE COMMAND...: redirects a command's output; only as `run into ...`, so that on_term prints to the job's file.
into() {
    exec >"$1" 2>&1
    shift
    "$@"
}

# last_lines NUMBER FILE: joins the last lines with words; mpirun prints lines without words, Slurm may add NUL bytes.
last_lines() { tr -d '\0' <"$2" | grep '[[:alnum:]]' | tail -n "$1" | paste -sd ' '; }

# ---------------------------------------------------------------- settings of the site
load_modules() {
    local module
    [ -n "${PDGEMM_MODULES:-}" ] || return 0
    type module >/dev/null 2>&1 ||
        die "$site: PDGEMM_MODULES is set, but there is no command 'module': source there what defines it"
    set +eu         # the functions of modules use variables that are not set
    module purge
    for module in $PDGEMM_MODULES; do
        module load "$module" || die "$site: PDGEMM_MODULES: module load $module fails; 'module avail' tells more"
    done
    set -eu
}

environment() {
    [ -r "$site" ] || die "PDGEMM_SITE: there is no file $site"
    set +eu
    # shellcheck source=slurm/site.sh
    . "$site"
    set -eu
    load_modules
    [ -n "${PDGEMM_VENV:-}" ] ||
        die "$site: PDGEMM_VENV is not set: name the environment that pdgemm is installed in"
    [ -x "$PDGEMM_VENV/bin/python" ] ||
        die "$site: PDGEMM_VENV=$PDGEMM_VENV has no bin/python on $(hostname -s): name one that all nodes see"
    PATH=$PDGEMM_VENV/bin:$PATH
    export VIRTUAL_ENV=$PDGEMM_VENV
    unset PYTHONHOME
    log=$(mktemp)
    trap 'rm -f "$log"' EXIT
    run into "$log" exec python -c 'import pdgemm; print(pdgemm.__version__)' ||
        die "$site: PDGEMM_VENV=$PDGEMM_VENV cannot import pdgemm ($(last_lines 1 "$log")): pip install it there"
    version=$(last_lines 1 "$log")
    [ -z "${PDGEMM_THREADS:-}" ] || export OMP_NUM_THREADS=$PDGEMM_THREADS
    # Since Slurm 22.05 srun does not inherit this from sbatch: each rank would have one core.
    [ -z "${SLURM_CPUS_PER_TASK:-}" ] || export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK
    export SLURM_KILL_BAD_EXIT=1    # if a rank fails, end its step: the other ranks would wait for it
    say "job ${job:-none} on $hosts, pdgemm $version of $PDGEMM_VENV"
}

# check_ranks: ends the job if its ranks do not see each other.
check_ranks() {
    local few sizes words hint='the file explains the choices'
    [ -z "${SLURM_JOB_ID:-}" ] || hint="'srun --mpi=list' tells what this Slurm speaks"
    [ -n "${PDGEMM_LAUNCH:-}" ] || die "$site: PDGEMM_LAUNCH is not set: choose one of the lines there; $hint"
    [[ $PDGEMM_LAUNCH = *'{ranks}'* ]] ||
        die "$site: PDGEMM_LAUNCH='$PDGEMM_LAUNCH' has no {ranks}, which is replaced by the number of ranks"
    command -v "${PDGEMM_LAUNCH%% *}" >/dev/null ||
        die "$site: PDGEMM_LAUNCH: there is no ${PDGEMM_LAUNCH%% *} on PATH: does PDGEMM_MODULES load the MPI?"
    export PDGEMM_LAUNCH            # `pdgemm scaling` uses it
    few=$((nodes > 2 ? nodes : 2))  # one rank on each node, if the launcher spreads them
    few=$((few < ranks ? few : ranks))
    local launch="$site: PDGEMM_LAUNCH='$PDGEMM_LAUNCH'"
    launcher "$few"
    local start=("${words[@]}" python -c '
import sys
import pdgemm
from mpi4py import MPI
version = MPI.Get_library_version().split(",")[0].split("\n")[0]
sys.stdout.write(f"ranks {MPI.COMM_WORLD.size} of {version}\n")')
    run into "$log" exec timeout 120 "${start[@]}" || {
        say "the launcher fails, and is tried once more"    # the daemon of a node may start late
        run into "$log" exec timeout 120 "${start[@]}"
    } ||
        die "$launch fails to start $few ranks in 120 s ($(last_lines 4 "$log")); $hint"
    sizes=$(grep -ao 'ranks [0-9]*' "$log" | sort | uniq -c | xargs)
    if [ "$few" != 1 ] && [ "$sizes" = "$few ranks 1" ]; then
        die "$launch starts $few processes that each see 1 rank: it does not speak the protocol of mpi4py's" \
            "$(grep -ao -m 1 'of .*' "$log" | cut -c 4-); choose another line there; $hint"
    fi
    [ "$sizes" = "$few ranks $few" ] || die "$launch was to start $few ranks, but there were: ${sizes:-none}; $hint"
    say "$ranks ranks by '$PDGEMM_LAUNCH'"
}

# ---------------------------------------------------------------- products
# operand NAME: checks that the variable NAME contains an existing dataset.
operand() {
    local dataset=${!1:-}
    [ -n "$dataset" ] || die "$1 is not set: sbatch --export=ALL,A=a.h5:/x,B=b.h5:/y,C=c.h5:/z $name"
    [[ $dataset = *:/?* ]] || die "$1='$dataset' is not of the form FILE:/DATASET"
    [ "$1" = C ] || [ -r "${dataset%%:/*}" ] || die "$1=$dataset: no file ${dataset%%:/*} (seen from $PWD)"
}

# mark: prints a text that changes whenever the file of C is replaced.
mark() { stat -c '%i %Y' "${C%%:/*}" 2>/dev/null || true; }

# checkpoint_of FILE DATASET: prints the path of the checkpoint, like place_of in io/streamed/unfinished.py.
checkpoint_of() {
    local file folder name most
    file=$(readlink -m "$1") && folder=$(dirname "$file")
    name=$(tr / '\n' <<<"$2" | grep -vx '\.\?' | paste -sd/ | sed 's:%:%25:g; s:\.:%2E:g; s:/:%2F:g')
    name=$(basename "$file").$name
    most=$(($(getconf NAME_MAX "$folder" 2>/dev/null || echo 255) - 64))
    if [ "$(printf %s "$name" | wc -c)" -gt "$most" ]; then
        name=$(printf %s "$name" | head -c $((most - 17)) | iconv -cs -f utf-8 -t utf-8)~$(printf %s "$name" | sha256sum | head -c 16)
    fi
    echo "$folder/$name.checkpoint"
}

# MACHINE=FILE: plans use the measurements in FILE; if it does not exist, they are made first.
use_machine() {
    [ -n "${MACHINE:-}" ] || return 0
    [ -e "$MACHINE" ] || run launch "$ranks" pdgemm calibrate -o "$MACHINE"
    export PDGEMM_MACHINE=$MACHINE
}

# multiply OPTION...: computes C := A B on all ranks, and checks C before it is stored.  OPTIONS has more options.
# CHECKPOINT=10min and MTBF=44h are passed as --checkpoint and --mtbf.
multiply() {
    local folder before words dataset checkpoint unfinished
    for dataset in A B C; do operand $dataset; done
    folder=$(dirname "${C%%:/*}")
    [ -d "$folder" ] || die "C=$C: there is no folder $folder (seen from $PWD)"
    if [ -n "${PDGEMM_STRIPES:-}" ]; then
        lfs setstripe -c "$PDGEMM_STRIPES" "$folder" ||
            die "$site: PDGEMM_STRIPES=$PDGEMM_STRIPES: lfs setstripe fails for $folder; empty where there is no Lustre"
    fi
    before=$(mark)
    checkpoint=$(checkpoint_of "${C%%:/*}" "${C#*:/}")
    unfinished=$([ ! -e "$checkpoint" ] || echo yes)
    saved() { [ "$checkpoint" -nt "$log" ]; }
    lost() {
        if [ "$(mark)" != "$before" ]; then
            say "$C was written before the end and is complete"
        elif [ -e "$checkpoint" ]; then
            say "nothing was written to $C; what is done is in $checkpoint: the same sbatch command goes on from there"
        else
            say "the product is lost; nothing was written to $C; submitted again, the job starts anew"
        fi
        find "$folder" -maxdepth 1 -name ".$(basename "${C%%:/*}").*.partial" -newer "$log" \
            -printf "$name: left behind, may be deleted (the next job that saves to $C does): %p\n"
    }
    read -ra words <<<"${CHECKPOINT:+--checkpoint $CHECKPOINT} ${MTBF:+--mtbf $MTBF} ${OPTIONS:-}"
    run launch "$ranks" pdgemm multiply "$A" "$B" -o "$C" --verify "$@" "${words[@]}"
    # An earlier run may have been killed after C was complete: then this run has only removed the checkpoint.
    if [ "$(mark)" = "$before" ] && ! { [ "$unfinished" ] && [ ! -e "$checkpoint" ]; }; then
        say "error: the launcher reports success, but nothing was written to $C: were its ranks killed?" >&2
        exit 3
    fi
}

# ---------------------------------------------------------------- other programs
# program [WORD...]: runs a command of pdgemm, or a Python program with its arguments, on all ranks.  The default words
# are those of PDGEMM_RUN, separated by blanks.  In a job array {task} is replaced by the number of the task.
program() {
    local words=("$@")
    [ $# != 0 ] || read -ra words <<<"${PDGEMM_RUN:-}"
    [ ${#words[@]} != 0 ] || die "no command: append 'my.py', or 'solve a.h5:/A b.h5:/b -o x.h5:/x'; PBS, LSF: PDGEMM_RUN='my.py'"
    if [[ ${words[*]} = *'{task}'* ]]; then
        [ -n "$task" ] || die "'${words[*]}' has {task}, but this job is not an array: sbatch --array=0-9 ... $name ..."
        words=("${words[@]//'{task}'/$task}")
    fi
    lost() { say "'${words[*]}' did not end; each file that pdgemm saves is complete or unchanged"; }
    if [[ ${words[0]} = *.py ]]; then
        [ -r "${words[0]}" ] || die "${words[0]}: no such program (seen from $PWD)"
        words=(python -m pdgemm "${words[@]}")
    else
        words=(pdgemm "${words[@]}")
    fi
    run launch "$ranks" "${words[@]}"
}

# train SCRIPT [WORD...]: runs a Python program that continues from `--state STATE`.
train() {
    [ -n "${STATE:-}" ] || die "STATE is not set: the file from which the program continues: export STATE=run.h5"
    saved() { [ "$STATE" -nt "$log" ]; }
    program "$@" --state "$STATE"
}

# ---------------------------------------------------------------- studies
measured() { if [ -r "$1" ]; then grep -c '"status": "ok"' "$1" || true; else echo 0; fi; }

# study FILE COMMAND...: appends measurements to FILE; measurements that FILE contains are not repeated.
study() {
    local file=$1 status=0
    shift
    mkdir -p "$(dirname "$file")" || die "OUT=${OUT:-.}: this folder cannot be made"
    lost() {
        say "$(measured "$file") measurements are finished and kept in $file; the one that ran is lost"
        say "the same sbatch command goes on from there"
    }
    run "$@" || status=$?
    say "$(measured "$file") measurements in $file"
    return $status
}
