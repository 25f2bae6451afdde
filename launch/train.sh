#!/usr/bin/env bash
# Trains on all GPUs of this machine, or of several: launch/train.sh --config-name RECIPE [overrides].
# For several machines set on each: NNODES, MASTER_ADDR (an address of one of them, which the others
# reach; and MASTER_PORT), and RDZV_SECRET: a secret, the same on all, made for this run.
# RANKS_PER_NODE is for other than one rank a GPU. In a Slurm step with a task a rank, it is that rank.
# Uses the environment of launch/setup.sh, or the Python in PATH where there is none.
set -euo pipefail

launch=$(dirname "$(readlink -f "$0")")
venv=${VENV:-$launch/../.venv}
[[ ! -x $venv/bin/python ]] || PATH=$(cd "$venv/bin" && pwd):$PATH
# shellcheck source=launch/environment.sh
. "$launch/environment.sh"

if ((${SLURM_STEP_NUM_TASKS:-1} > ${SLURM_STEP_NUM_NODES:-1})); then
    export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_STEP_NUM_TASKS
    export LOCAL_WORLD_SIZE=$((SLURM_STEP_NUM_TASKS / SLURM_STEP_NUM_NODES))
    exec python -m megatron_ext.train "$@"
fi
if [[ ${NNODES:-1} == 1 ]]; then
    exec python -m megatron_ext train "$@" ${RANKS_PER_NODE:+--ranks "$RANKS_PER_NODE"}
fi

for word in "$@"; do
    case $word in
    --print | --dry-run) exec python -m megatron_ext train "$@" ;; # Nothing is started.
    -m | --multirun)
        echo "error: $word makes runs of one machine each, and NNODES ($NNODES) one of several" >&2
        exit 2
        ;;
    esac
done
: "${MASTER_ADDR:?an address of one of the machines}" "${RDZV_SECRET:?a secret that all machines know}"
restarts=${MAX_RESTARTS:-$(python -m megatron_ext train "$@" --print | sed -n 's/^restarts: //p')}
export RDZV_SECRET
# Where a machine ends before another, torch would print stacks of C++ on the other.
export TORCH_CPP_LOG_LEVEL=${TORCH_CPP_LOG_LEVEL:-ERROR}
exec python -m megatron_ext.trainer.ranks.agent \
    --nnodes "$NNODES" \
    --rdzv-endpoint "$MASTER_ADDR:${MASTER_PORT:-29500}" \
    --nproc-per-node "${RANKS_PER_NODE:-gpu}" \
    --max-restarts "$restarts" \
    -m megatron_ext.train "$@"
