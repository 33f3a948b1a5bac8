#!/usr/bin/env bash
# Quantizes one model with the tasks of a job array, which share the work through the file system of the output:
#     sbatch slurm-array.sh /data/model /data/model-gptq-int4
# All tasks end when the result is there. A task that dies or begins late costs nothing but time; to go on after the
# whole job was ended, submit it again.
#SBATCH --job-name=quantforge
#SBATCH --array=0-7
#SBATCH --cpus-per-task=16
#SBATCH --mem=64G
#SBATCH --time=12:00:00
set -euo pipefail
model=$1
out=$2
shift 2
export OMP_NUM_THREADS=${SLURM_CPUS_PER_TASK:-1}
quantforge quantize "$model" --method gptq --bits 4 --join -o "$out" \
    --log "$out.task-${SLURM_ARRAY_TASK_ID:?is set by sbatch --array}.jsonl" "$@"
