#!/usr/bin/env bash
#SBATCH --job-name=megatron_ext
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
# sbatch --nodes=4 launch/slurm.sh --config-name RECIPE [overrides]
# One task a machine starts its ranks. The run directory must be on a file system that all machines
# share; a job that is started again continues from the newest checkpoint.
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:?start this with sbatch, from the root of the repository}"

MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_ADDR NNODES=$SLURM_NNODES
# NODE_RANK differs between tasks, so it is set inside of them.
# shellcheck disable=SC2016
srun bash -c 'NODE_RANK=$SLURM_NODEID exec launch/train.sh "$@"' train "$@"
