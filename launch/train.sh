#!/usr/bin/env bash
# Trains on all GPUs of this machine, or of several: launch/train.sh --config-name RECIPE [overrides].
# For several machines set on each: NNODES, NODE_RANK, MASTER_ADDR (and MASTER_PORT).
# Needs launch/setup.sh to have run.
set -euo pipefail
cd "$(dirname "$0")/.."

# Megatron overlaps communication by the order of launches, which one queue to the device keeps.
export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-4}
exec .venv/bin/torchrun \
    --nnodes "${NNODES:-1}" \
    --node-rank "${NODE_RANK:-0}" \
    --master-addr "${MASTER_ADDR:-localhost}" \
    --master-port "${MASTER_PORT:-29500}" \
    --nproc-per-node "${RANKS_PER_NODE:-gpu}" \
    -m megatron_ext.train "$@"
