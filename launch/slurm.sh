#!/usr/bin/env bash
#SBATCH --job-name=megatron_ext
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --signal=B:USR1@120
#SBATCH --requeue
# sbatch --nodes=4 launch/slurm.sh --config-name RECIPE [overrides]
# One task a machine starts its ranks. The run directory must be on a file system that all machines
# share; a job that is started again continues from the newest checkpoint. Some time before the job's
# limit (--signal, in seconds: longer than a save takes), the ranks save, and the job queues again.
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:?start this with sbatch, from the root of the repository}"

MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
RDZV_SECRET=$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')
export MASTER_ADDR RDZV_SECRET NNODES=$SLURM_NNODES

srun launch/train.sh "$@" &
tasks=$!
noticed=false
# srun passes signals on to its tasks. Slurm itself sends them SIGTERM; this shell waits for them then.
trap 'noticed=true; kill -USR1 "$tasks"' USR1
trap : TERM
status=0
wait "$tasks" || status=$?
while kill -0 "$tasks" 2>/dev/null; do # A signal ended the wait, not the tasks.
    status=0
    wait "$tasks" || status=$?
done
if $noticed && ((status != 0)); then
    scontrol requeue "$SLURM_JOB_ID" || echo "launch/slurm.sh: this job may not queue again" >&2
fi
exit "$status"
