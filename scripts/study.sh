#!/usr/bin/env bash
# Runs a strong and a weak scaling study of this machine, and writes a report.  Installs the requirements first.
#
#   scripts/study.sh [FOLDER] [--ranks 1,2,4] [--strong 4096,4096,4096] [--weak 2048,2048,2048] [SCALING OPTIONS...]
#
# strong.jsonl, weak.jsonl, report.html and report.png are written to FOLDER (study-data).  The same command continues
# a study that was interrupted.  If some measurements fail, the others are drawn, and the exit code is the study's.
set -euo pipefail
root=$(cd -P "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
. "$root/scripts/common.sh"
help_asked "$@"

folder=study-data
case ${1:-} in
    '' | -*) ;;
    *) folder=$1; shift ;;
esac
ranks=1,2,4 strong=4096,4096,4096 weak=2048,2048,2048 options=()
while [ $# != 0 ]; do
    case $1 in
        --ranks) ranks=$2; shift 2 ;;
        --strong) strong=$2; shift 2 ;;
        --weak) weak=$2; shift 2 ;;
        *) options+=("$1"); shift ;;
    esac
done

"$root/scripts/setup.sh" plot
. "$root/scripts/env.sh"
mkdir -p "$folder"
status=0
pdgemm scaling strong --shape "$strong" --ranks "$ranks" --out "$folder/strong.jsonl" "${options[@]}" || status=$?
[ $status -le 1 ] || exit $status
pdgemm scaling weak --shape "$weak" --ranks "$ranks" --out "$folder/weak.jsonl" "${options[@]}" || status=$?
[ $status -le 1 ] || exit $status
for report in report.html report.png; do
    pdgemm plot "$folder/strong.jsonl" "$folder/weak.jsonl" --out "$folder/$report"
done
exit $status
