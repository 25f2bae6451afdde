#!/usr/bin/env bash
# Trains on all GPUs of this machine, or of several: launch/train.sh --config-name RECIPE [overrides].
# For several machines set on each: NNODES, MASTER_ADDR (an address of one of them, which the others
# reach; and MASTER_PORT), and RDZV_SECRET: a secret, the same on all, made for this run.
# Needs launch/setup.sh to have run.
set -euo pipefail
cd "$(dirname "$0")/.."

# Megatron overlaps communication by the order of launches, which one queue to the device keeps.
export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-4}
train=(.venv/bin/megatron-ext train "$@")
if [[ ${NNODES:-1} == 1 ]]; then
    exec "${train[@]}" ${RANKS_PER_NODE:+--ranks "$RANKS_PER_NODE"}
fi

: "${MASTER_ADDR:?an address of one of the machines}" "${RDZV_SECRET:?a secret that all machines know}"
restarts=$("${train[@]}" --print | sed -n 's/^restarts: //p')
export RDZV_SECRET
exec .venv/bin/python -m megatron_ext.trainer.agent \
    --nnodes "$NNODES" \
    --rdzv-endpoint "$MASTER_ADDR:${MASTER_PORT:-29500}" \
    --nproc-per-node "${RANKS_PER_NODE:-gpu}" \
    --max-restarts "$restarts" \
    -m megatron_ext.train "$@"
