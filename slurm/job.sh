# shellcheck shell=bash disable=SC2119,SC2120,SC2317 # lost() is called by a trap
# The part of the job scripts that nobody needs to touch; they source it with their name.  A site's settings: site.sh.
#
#   environment     the site's settings are read and looked at, the programs are on PATH
#   check_ranks     the launcher starts ranks that see each other
#   run, launch     a step that a signal can end
#   multiply        C := A B from file to file
#   program         a command of pdgemm, or a Python program
#   train           a Python program that goes on from the state that it has saved
# It ends the job with pdgemm's exit codes: 0 done, 1 a result is wrong, 2 bad input; or 143 after SIGTERM.
set -euo pipefail
name=$1

say() { printf '%s\n' "$name: $*"; }
die() { printf '%s\n' "$name: error: $*" >&2 && exit 2; }

# ---------------------------------------------------------------- the batch system
# Slurm, PBS and LSF describe an allocation in variables of their own; these have the same meaning under each:
#   job, hosts     its number, and its nodes, for people
#   nodes, ranks   how many of each the job has
#   task           the number of this task of a job array; empty where there is none
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

# A site file that is yours alone stands outside of the checkout, where no update of pdgemm touches it.
site=${PDGEMM_SITE:-${XDG_CONFIG_HOME:-${HOME:-}/.config}/pdgemm/site.sh}
[ -n "${PDGEMM_SITE:-}" ] || [ -r "$site" ] || site=$here/site.sh

# ---------------------------------------------------------------- steps and signals
step='' started=''  # number of the process that runs in the background, and what it is
lost() { :; }       # says what the end of the job costs; scripts redefine it

# end_step SIGNAL SECONDS: sends it to the step that runs, and waits for its end.
end_step() {
    kill "-$1" "$step" 2>/dev/null || return 0
    for ((i = 0; i < $2 * 10; i++)); do
        kill -0 "$step" 2>/dev/null || return 0
        sleep 0.1
    done
}

# end_job WHY SECONDS: the step has so many seconds to end by itself.  Bash hears a signal while it waits for the step, not
# while a program runs in the foreground.
end_job() {
    trap '' TERM USR1
    say "$1"
    if [ -n "$step" ]; then
        # Launchers hand SIGUSR1 on to pdgemm's ranks, which take it for SIGTERM; at SIGTERM they kill the ranks.
        [ "$started" != launch ] || end_step USR1 "$2"
        end_step TERM 16
        end_step KILL 1
    fi
    lost
}

# By scancel, which waits for 30 seconds until it kills, and by --signal=B:TERM@60 before the time limit.
on_term() {
    end_job "SIGTERM: the time limit is near, or the job was cancelled" 8
    exit 143
}
trap on_term TERM

# By --signal=B:USR1@120 before the time limit.  A product with checkpoints has time to save one, and goes on in the next
# run of the job, as training does, unless this one has saved nothing: that would never end.
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
saved() { false; }  # whether the job has saved a checkpoint; multiply and train redefine it
trap on_limit USR1

# run COMMAND...: in the background, waited for; its exit code.
run() {
    local status=0
    started=$1
    "$@" &
    step=$!
    wait "$step" || status=$?
    step=''
    return $status
}

# launcher RANKS: sets $words to the command that starts so many.
launcher() { read -ra words <<<"${PDGEMM_LAUNCH//'{ranks}'/$1}"; }

# launch RANKS COMMAND...: on so many ranks; only as `run launch ...`, for it takes the place of the shell.
launch() {
    local words
    launcher "$1"
    shift
    exec "${words[@]}" "$@"
}

# into FILE COMMAND...: with its output in a file; only as `run into ...`, so that on_term still speaks to the job's.
into() {
    exec >"$1" 2>&1
    shift
    "$@"
}

# last_lines NUMBER FILE: of those with words, as one line (mpirun draws rulers); NUL bytes may come from Slurm.
last_lines() { tr -d '\0' <"$2" | grep '[[:alnum:]]' | tail -n "$1" | paste -sd ' '; }

# ---------------------------------------------------------------- what the site sets
load_modules() {
    local module
    [ -n "${PDGEMM_MODULES:-}" ] || return 0
    type module >/dev/null 2>&1 ||
        die "$site: PDGEMM_MODULES is set, but there is no command 'module': source there what defines it"
    set +eu         # modules' own functions use variables that are not set
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
    # Since Slurm 22.05 srun no longer takes this from sbatch: each rank would have one core.
    [ -z "${SLURM_CPUS_PER_TASK:-}" ] || export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK
    export SLURM_KILL_BAD_EXIT=1    # a rank that fails ends its step; the others would wait for it
    say "job ${job:-none} on $hosts, pdgemm $version of $PDGEMM_VENV"
}

# Ends the job if its ranks would not see each other.
check_ranks() {
    local few sizes words hint='the file explains the choices'
    [ -z "${SLURM_JOB_ID:-}" ] || hint="'srun --mpi=list' tells what this Slurm speaks"
    [ -n "${PDGEMM_LAUNCH:-}" ] || die "$site: PDGEMM_LAUNCH is not set: choose one of the lines there; $hint"
    [[ $PDGEMM_LAUNCH = *'{ranks}'* ]] ||
        die "$site: PDGEMM_LAUNCH='$PDGEMM_LAUNCH' has no {ranks}, which becomes their number"
    command -v "${PDGEMM_LAUNCH%% *}" >/dev/null ||
        die "$site: PDGEMM_LAUNCH: there is no ${PDGEMM_LAUNCH%% *} on PATH: does PDGEMM_MODULES load the MPI?"
    export PDGEMM_LAUNCH            # pdgemm scaling starts its steps with it
    few=$((nodes > 2 ? nodes : 2))  # one on each node, if the launcher spreads them
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
        say "the launcher fails, and is tried once more"    # a node's daemon may come late
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
# operand NAME: the dataset in the variable of that name must be there.
operand() {
    local dataset=${!1:-}
    [ -n "$dataset" ] || die "$1 is not set: sbatch --export=ALL,A=a.h5:/x,B=b.h5:/y,C=c.h5:/z $name"
    [[ $dataset = *:/?* ]] || die "$1='$dataset' is not of the form FILE:/DATASET"
    [ "$1" = C ] || [ -r "${dataset%%:/*}" ] || die "$1=$dataset: no file ${dataset%%:/*} (seen from $PWD)"
}

# Changes whenever another file takes the name of C.
mark() { stat -c '%i %Y' "${C%%:/*}" 2>/dev/null || true; }

# The checkpoint of a file and a dataset, as place_of in io/streamed/unfinished.py names it.
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

# MACHINE=FILE: plans use its measurements, which are made once if there is no such file.
use_machine() {
    [ -n "${MACHINE:-}" ] || return 0
    [ -e "$MACHINE" ] || run launch "$ranks" pdgemm calibrate -o "$MACHINE"
    export PDGEMM_MACHINE=$MACHINE
}

# multiply OPTION...: C := A B on all ranks, checked before it is stored.  OPTIONS has more of them.
# CHECKPOINT=10min, MTBF=44h: the options of these names.
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
    # An earlier run may have been ended when C was complete: then this one has removed its checkpoint.
    if [ "$(mark)" = "$before" ] && ! { [ "$unfinished" ] && [ ! -e "$checkpoint" ]; }; then
        say "error: the launcher reports success, but nothing was written to $C: were its ranks killed?" >&2
        exit 3
    fi
}

# ---------------------------------------------------------------- other programs
# program [WORD...]: a command of pdgemm, or a Python program with its arguments, on all ranks.  Without words: those of
# PDGEMM_RUN, separated by blanks.  In a job array {task} stands for the number of the task.
program() {
    local words=("$@")
    [ $# != 0 ] || read -ra words <<<"${PDGEMM_RUN:-}"
    [ ${#words[@]} != 0 ] || die "no command: append 'my.py', or 'solve a.h5:/A b.h5:/b -o x.h5:/x'; PBS, LSF: PDGEMM_RUN='my.py'"
    if [[ ${words[*]} = *'{task}'* ]]; then
        [ -n "$task" ] || die "'${words[*]}' has {task}, but this job is not an array: sbatch --array=0-9 ... $name ..."
        words=("${words[@]//'{task}'/$task}")
    fi
    lost() { say "'${words[*]}' did not end; files that pdgemm saves are whole, or as they were before"; }
    if [[ ${words[0]} = *.py ]]; then
        [ -r "${words[0]}" ] || die "${words[0]}: no such program (seen from $PWD)"
        words=(python -m pdgemm "${words[@]}")
    else
        words=(pdgemm "${words[@]}")
    fi
    run launch "$ranks" "${words[@]}"
}

# train SCRIPT [WORD...]: a Python program that goes on from `--state STATE`.
train() {
    [ -n "${STATE:-}" ] || die "STATE is not set: the file from which the program goes on: export STATE=run.h5"
    saved() { [ "$STATE" -nt "$log" ]; }
    program "$@" --state "$STATE"
}

# ---------------------------------------------------------------- studies
measured() { if [ -r "$1" ]; then grep -c '"status": "ok"' "$1" || true; else echo 0; fi; }

# study FILE COMMAND...: measurements are appended to FILE; what it holds is not measured again.
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
