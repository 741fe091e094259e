#!/usr/bin/env bash
# Installs the requirements, and runs the test suite.
#
#   scripts/test.sh                                   the suite, which runs on each change
#   scripts/test.sh --also PART                       the suite and one part of the rest:
#                                                     attacks   ranks and launchers are killed, files damaged, 2 minutes
#                                                     clusters  several hosts, and a Slurm cluster, on this machine
#                                                     debian    the distribution's MPI, parallel HDF5, ScaLAPACK
#                                                     thorough  the tests with the mark "thorough", on 1, 2 and 4 ranks
#                                                     N         a number, which chooses the parts in turn
#   scripts/test.sh --all                             the suite with all combinations of parameters, all examples and
#                                                     more ranks, and all parts of the rest; several times as long
#   scripts/test.sh --changed [BASE]                  ruff, mypy, the hooks, and the tests nearest to the changes since
#                                                     this branch left BASE (main), on 2 and 4 ranks; the choice is
#                                                     explained in scripts/hardening/concerned.py
#   scripts/test.sh --ranks "1 4" [PYTEST ARGS...]    only these rank counts; with arguments, only pytest, in .venv
#
# PDGEMM_ARRAY_API_TESTS names a folder with the tests of the array API standard (scripts/array_api.sh), by default
# ../array-api-tests. --all runs all of them, the suite a tenth, in turns.
#
# All parts run even if one fails; the table at the end has the result of each, and the tests that ran in no part.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"
help_asked "$@"
cd -P "$(dirname "${BASH_SOURCE[0]}")/.."

ranks='1 2 3 4 6'       # tests/helpers/tiers.py chooses the tests of each rank count
all=no chosen=no changed=no also=''
rest='attacks clusters debian thorough'

# chosen_part WORD: prints the part of the rest that a name or a number chooses.
chosen_part() {
    local parts=($rest)
    case " $rest " in *" $1 "*) echo "$1" && return ;; esac
    [[ $1 =~ ^[0-9]+$ ]] || { echo "test.sh: --also is one of $rest, or a number, not '$1'" >&2; return 1; }
    echo "besides the suite: ${parts[$1 % 4]}; by the next numbers: ${parts[($1 + 1) % 4]}, ${parts[($1 + 2) % 4]}," \
        "${parts[($1 + 3) % 4]}" >&2
    echo "${parts[$1 % 4]}"
}

while :; do
    case ${1:-} in
        --all)
            all=yes also=$rest
            [ $chosen = yes ] || ranks='1 2 3 4 6 8 9'
            shift ;;
        --also)
            also=$(chosen_part "${2:-}") || exit 2
            shift 2 ;;
        --ranks)
            chosen=yes ranks=$2
            shift 2 ;;
        --changed)
            changed=yes base=main
            [ $chosen = yes ] || ranks='2 4'
            shift
            case ${1:-} in '' | -*) ;; *) base=$1 && shift ;; esac ;;
        *) break ;;
    esac
done
[ $changed = no ] || [ $# = 0 ] || { echo "test.sh: --changed chooses the tests itself; not '$*'" >&2; exit 2; }
[ -t 1 ] || export NO_COLOR=1     # Open MPI 4 gives its ranks a terminal, so pytest would print colours
part_seconds=2400       # the time limit of a part; each test has its own timeout besides
results=$(mktemp -d)
cluster=''
trap '[ -z "$cluster" ] || scripts/slurm_cluster.sh down "$cluster"; rm -rf "$results"' EXIT
trap 'exit 130' INT
table=()
passed=0 failed=0 skipped=0

# record PART PASSED FAILED SKIPPED SECONDS [NOTE]
record() {
    table+=("$(printf '%-24s %7s %7s %8s %8s  %s' "$1" "$2" "$3" "$4" "$5" "${6:-}")")
    ((passed += $2, failed += $3, skipped += $4)) || true
}

# check PART COMMAND...: runs a command, and records whether it passed or failed.
check() {
    local part=$1 start=$SECONDS status=0
    shift
    printf '\n== %s\n' "$part"
    timeout --foreground -k 10 "$part_seconds" "$@" </dev/null || status=$?
    record "$part" $((status == 0)) $((status != 0)) 0 $((SECONDS - start))
}

# tests PART COMMAND...: runs pytest, and records the counts that its rank 0 writes; without counts it has failed.
# $about is the note of a run without errors.
tests() {
    local part=$1 start=$SECONDS status=0 counts note=''
    shift
    printf '\n== %s\n' "$part"
    rm -f "$results/summary"
    PDGEMM_TEST_SUMMARY=$results/summary timeout --foreground -k 10 "$part_seconds" "$@" </dev/null || status=$?
    if [ "$status" = 5 ] && [ "$selected" = yes ]; then
        record "$part" 0 0 0 $((SECONDS - start)) 'no test selected'
        return
    fi
    case $status in
        0) ;;
        5) note='no tests' ;;
        124) note="stopped after $part_seconds s" ;;
        *) note="exit code $status" ;;
    esac
    counts=$(python -c '
import json, sys
s = json.load(open(sys.argv[1]))
print(s["passed"], max(s["failed"], int(sys.argv[2] != "0")), s["skipped"])' "$results/summary" "$status" 2>/dev/null) || {
        counts='0 1 0'
        note="${note:-no summary}"
    }
    record "$part" $counts $((SECONDS - start)) "${note:-${about:-}}"
    mv "$results/summary" "$results/part ${#table[@]}" 2>/dev/null || true
}

# wanted PART: succeeds if this run includes this part of the rest.
wanted() {
    [ $selected = no ] || return 1
    case " $also " in *" $1 "*) ;; *) return 1 ;; esac
}

selected=no
[ $# = 0 ] || selected=yes
scripts/setup.sh dev demo
. scripts/env.sh
if [ $changed = yes ]; then
    selected=yes
    nearest=$(python scripts/hardening/concerned.py "$base") || exit 2
    set -- $nearest
    [ $# != 0 ] || ranks=''
fi
unset PYTHONDONTWRITEBYTECODE       # otherwise a thousand processes would each compile the package
pytest=(python -m pytest -q)
minutes=0.5 several_hosts='2 2'
if [ $all = yes ]; then
    pytest+=(--all --timeout 360)       # longer, because there are more ranks than cores
    minutes=2 several_hosts='2 1,2 2,3 2'
fi
everywhere=("${pytest[@]}" -p no:cacheprovider --with-mpi -m mpi)
parallel=("${everywhere[@]}")
[ $chosen = yes ] || parallel+=(--tiers)

if [ $selected$changed != yesno ]; then
    check 'ruff' ruff check .
    check 'mypy' mypy
    check 'hooks' env SKIP=ruff,mypy pre-commit run --all-files
fi
export OMP_NUM_THREADS=1    # processes share the cores, and waiting threads of a BLAS would use cores of others
three=()    # three processes run the serial tests, which wait for jobs half of their time
[ $selected$changed = yesno ] || three=(-n 3 --dist worksteal)
[ -z "$ranks" ] || tests 'serial' "${pytest[@]}" "${three[@]}" -m 'not mpi' "$@"
if wanted attacks; then
    status=0
    reason=$(unshare -mpf --mount-proc true 2>&1) || reason=$(unshare -Urmpf --mount-proc true 2>&1) || status=$?
    if [ $status = 0 ]; then
        check 'hostile' python scripts/hardening/hostile.py --minutes "$minutes" --seed 18
        check 'restarts' python scripts/hardening/hostile.py --kind restart --minutes "$minutes" --ranks 9 --seed 18
        check 'survivors' python scripts/hardening/hostile.py --kind survivors --minutes "$minutes" --ranks 9 --seed 18
    else
        record 'hostile' 0 0 0 0 "not run, because there are no namespaces: ${reason##*$'\n'}"
    fi
fi
for n in $ranks; do
    if [ "$n $selected" = '1 no' ]; then    # two processes; each is the only rank of its job
        tests '1 rank' "${parallel[@]}" -n 2 --dist worksteal
    else
        tests "$n rank$([ "$n" = 1 ] || echo s)" mpiexec -n "$n" "${parallel[@]}" "$@"
    fi
done

if [ $selected = no ]; then
    case "$all $ranks " in yes*' 9 '*)     # a grid of 2 x 2 x 3
        tests '12 ranks' mpiexec -n 12 "${everywhere[@]}" tests/ranks/algorithms/test_algorithms.py ;;
    esac
fi
if [ $selected = no ]; then
    standard=${PDGEMM_ARRAY_API_TESTS:-../array-api-tests}
    tenth=(--examples 5 --ranks 2 --part "$(($(git rev-list --count HEAD 2>/dev/null || echo 0) % 10))/10")
    [ $all = no ] || tenth=(--minutes 12)
    if [ -d "$standard/array_api_tests" ]; then
        check 'array API standard' scripts/array_api.sh "$standard" "${tenth[@]}"
    else
        record 'array API standard' 0 0 0 0 "not run, because there is no folder $standard"
    fi
fi
if [ $all = no ] && wanted thorough; then       # --all has run them above
    widest=("${pytest[@]}" --all --timeout 360)
    tests 'thorough, serial' "${widest[@]}" -n 3 --dist worksteal -m 'thorough and not mpi'
    for n in 1 2 4; do
        tests "thorough, $n rank$([ "$n" = 1 ] || echo s)" mpiexec -n "$n" \
            "${widest[@]}" -p no:cacheprovider --with-mpi -m 'thorough and mpi' --tiers
    done
fi
if wanted clusters; then
    status=0
    reason=$(scripts/hosts.sh 1 true 2>&1) || status=$?
    case $(mpirun --version) in
        *'Open MPI'*) ;;
        *) status=3 reason='it needs Open MPI' ;;
    esac
    if [ $status = 0 ]; then
        about='words counted by network cards'
        while read -r hosts each; do
            n=$((hosts * each))
            case " $ranks " in *" $n "*) ;; *) continue ;; esac
            tests "$hosts hosts, $n ranks" scripts/hosts.sh "$hosts" \
                mpirun -n "$n" --map-by "ppr:$each:node" "${everywhere[@]}" tests/cluster/across_hosts.py
        done <<<"${several_hosts//,/$'\n'}"
        about=''
    elif [ $status = 3 ]; then
        record 'several hosts' 0 0 0 0 "not run, because ${reason##*sh: }"
    else
        printf '%s\n' "$reason" >&2
        record 'several hosts' 0 1 0 0 'scripts/hosts.sh failed'
    fi
    exec 3>&1

    status=0
    cluster=$results/cluster
    reason=$(scripts/slurm_cluster.sh up "$cluster" 2>&1 >&3) || status=$?
    case $status in
        0) SLURM_CONF=$cluster/slurm.conf tests 'slurm' "${pytest[@]}" -n 2 --dist load tests/cluster/test_slurm_*.py ;;
        3) record 'slurm' 0 0 0 0 "not run, because ${reason##*sh: }" ;;
        *) printf '%s\n' "$reason" >&2 && record 'slurm' 0 1 0 0 'its cluster does not start' ;;
    esac
    [ $status != 0 ] || scripts/slurm_cluster.sh down "$cluster"
    cluster=''
fi
if wanted debian; then
    exec 3>&1
    status=0
    reason=$(scripts/setup_parallel_hdf5.sh 2>&1 >&3) || status=$?
    if [ $status = 0 ]; then
        deactivate
        PDGEMM_VENV=.venv-parallel
        . scripts/env.sh
        about='parallel HDF5, ScaLAPACK'
        for n in 2 4; do
            case " $ranks " in *" $n "*) ;; *) continue ;; esac
            tests "Debian MPI, $n ranks" \
                mpiexec -n "$n" "${parallel[@]}" tests/io/test_hdf5*.py tests/ranks/interop/test_scalapack*.py
        done
    elif [ $status = 3 ]; then
        record 'Debian MPI' 0 0 0 0 "not run, because ${reason##*sh: }"
    else
        printf '%s\n' "$reason" >&2
        record 'Debian MPI' 0 1 0 0 'its setup failed'
    fi
fi

if [ $((passed + failed + skipped)) = 0 ]; then
    record 'all' 0 1 0 0 'no test was run'
fi
printf '\n%-24s %7s %7s %8s %8s\n' part passed failed skipped seconds
printf '%s\n' "${table[@]}"
[ $selected = yes ] || python -c '
import json, sys
from collections import Counter
from pathlib import Path
parts = [json.loads(x.read_text()) for x in Path(sys.argv[1]).glob("part *")]
ran = {name for part in parts for name in part["ran"]}
nowhere = {name for part in parts for name in part["left_out"]} - ran
if nowhere:
    files = Counter(name.partition("::")[0] for name in nowhere)
    print("\nskipped in all parts: " + ", ".join(f"{number} of {file}" for file, number in sorted(files.items())))
' "$results"
printf '\n%s passed, %s failed, %s skipped\n' "$passed" "$failed" "$skipped"
[ "$failed" = 0 ]
