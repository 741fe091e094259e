#!/usr/bin/env bash
# A strong and a weak scaling study in Slurm, and the report of both: three jobs, submitted from a login node.
#
#   ALLOCATION='-N 4 --ntasks-per-node=8' RANKS=1,2,4,8,16,32 docs/examples/scaling_study.sh [FOLDER]
#
# FOLDER (scaling-study) takes the measurements, one line of JSON each, and then report.html and report.png.
# Set slurm/site.sh first, or PDGEMM_SITE.  A study that was ended goes on when the same command is given again.
# ALLOCATION    words for sbatch; the largest number of ranks must fit the nodes that it asks for
# STRONG, WEAK  m,n,k of a product on all these numbers of ranks, and of the part of one rank
# MACHINE       what `pdgemm calibrate` measures of this machine, once (default: machine.json in the folder)
# OPTIONS       more words for `pdgemm scaling`, such as --algorithm summa --algorithm 2.5d
set -euo pipefail
slurm=$(cd "$(dirname "${BASH_SOURCE[0]}")/../../slurm" && pwd)

export OUT=${1:-scaling-study} RANKS=${RANKS:-1,2,4,8,16,32}
export MACHINE=${MACHINE:-$OUT/machine.json}
mkdir -p "$OUT"
read -ra options <<<"--parsable ${ALLOCATION:--N 4}"

strong=$(SHAPES=${STRONG:-16384,16384,16384} sbatch "${options[@]}" "$slurm/strong.sbatch")
options+=(--dependency="afterany:$strong" --array="$RANKS")
weak=$(SHAPES=${WEAK:-4096,4096,4096} sbatch "${options[@]}" "$slurm/weak.sbatch")
figures=$(sbatch --parsable --dependency="afterany:$strong:$weak" "$slurm/figures.sbatch")
echo "jobs $strong (strong scaling), $weak (weak scaling), $figures (the report: $OUT/report.html)"
