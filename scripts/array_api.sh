#!/usr/bin/env bash
# Runs the tests of the Python array API standard (github.com/data-apis/array-api-tests) on pdgemm.array_api.
#
#   scripts/array_api.sh DIR [OPTIONS] [PYTEST ARGS...]    DIR has the tests and the submodule array-api; nothing is
#                                                          written there
#
#   --examples N       examples of each test, by default 20
#   --ranks "1 2 4"    numbers of ranks
#   --size N           most elements of a drawn array, by default 256
#   --part K/N         only each N-th test, from the K-th on
#   --minutes N        limit for each number of ranks, by default 60
#
# All ranks draw the same examples, and a test that fails on one rank fails on all.  Tests that are expected to fail are
# in scripts/array_api_exceptions.txt, each with a reason.  The table at the end has, for each group of tests and number
# of ranks, the tests that passed, failed, failed as excepted, and were skipped by the tests themselves.  Exit code 3: not
# run, because DIR is not there.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"
help_asked "$@"
root=$(cd -P "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
suite=${1:-} ranks='1 2 4' examples=20 minutes=60 size=256 part=0/1
if [ ! -d "$suite/array_api_tests" ] || [ ! -d "$suite/array-api/spec" ]; then
    exit_code=3 die "not run, because '$suite' does not have the tests and the submodule of the standard"
fi
suite=$(cd -P "$suite" && pwd)
shift
while :; do
    case ${1:-} in
        --examples) examples=$2 && shift 2 ;;
        --ranks) ranks=$2 && shift 2 ;;
        --size) size=$2 && shift 2 ;;
        --part) part=$2 && shift 2 ;;
        --minutes) minutes=$2 && shift 2 ;;
        *) break ;;
    esac
done
. "$root/scripts/env.sh"
results=$(mktemp -d)
trap 'rm -rf "$results"' EXIT
trap 'exit 130' INT
[ -t 1 ] || export NO_COLOR=1
export PYTHONPATH=$root:$root/tests/helpers${PYTHONPATH:+:$PYTHONPATH} OMP_NUM_THREADS=1
export PYTHONHASHSEED=0 # the order of sets is the same on all ranks
export PYTHONPYCACHEPREFIX=$results/pycache HYPOTHESIS_STORAGE_DIRECTORY=$results/hypothesis
export ARRAY_API_TESTS_MODULE=pdgemm.array_api ARRAY_API_TESTS_MAX_ARRAY_SIZE=$size PDGEMM_TEST_PART=$part
status=0
cd "$suite"
[ $# != 0 ] || set -- array_api_tests
for n in $ranks; do
    printf '\n== %s rank%s\n' "$n" "$([ "$n" = 1 ] || echo s)"
    PDGEMM_TEST_SUMMARY="$results/$n.json" timeout --foreground -k 10 $((60 * minutes)) mpiexec -n "$n" \
        python -m pytest -q -p no:cacheprovider -p mpi_report -p part_of_tests --with-mpi --timeout 600 --tb short \
        --max-examples "$examples" --derandomize --disable-deadline --disable-warnings \
        "--xfails-file=$root/scripts/array_api_exceptions.txt" "--rootdir=$suite" "$@" </dev/null || status=1
done
python - "$results" $ranks <<'END' || status=1
import json
import sys
from collections import Counter
from pathlib import Path

counts, ranks = Counter(), sys.argv[2:]
for n in ranks:
    try:
        told = json.loads(Path(sys.argv[1], f"{n}.json").read_text())
    except FileNotFoundError:
        sys.exit(f"{n} ranks: no result")
    broken, excepted = ({*told[key]} for key in ("broken", "excepted"))
    for name in told["ran"] + told["left_out"]:
        outcome = 1 if name in broken else 2 if name in excepted else 3 if name in told["left_out"] else 0
        for group in (Path(name.partition("::")[0]).stem.removeprefix("test_"), "all"):
            counts[group, n, outcome] += 1
groups = sorted({group for group, _, _ in counts}, key=lambda x: (x == "all", x))
print(f"\n{'passed / failed / excepted / skipped on':40}", *(f"{n + ' ranks':>22}" for n in ranks))
for group in groups:
    print(f"{group:40}", *(f"{' / '.join(str(counts[group, n, k]) for k in range(4)):>22}" for n in ranks))
END
exit $status
