#!/usr/bin/env bash
# Makes a release with the tasks of a job array, which share its variants through the file system of the output:
#     sbatch slurm-array.sh release.toml /data/release
# All tasks end when the release is there. A task that dies or begins late costs nothing but time; to go on after the
# whole job was ended, submit it again.
#SBATCH --job-name=quantforge
#SBATCH --array=0-7
#SBATCH --cpus-per-task=16
#SBATCH --mem=64G
#SBATCH --time=12:00:00
set -euo pipefail
spec=$1
out=$2
shift 2
export OMP_NUM_THREADS=${SLURM_CPUS_PER_TASK:-1}
echo "task ${SLURM_ARRAY_TASK_ID:?is set by sbatch --array}" >&2
quantforge release "$spec" --join -o "$out" "$@"
