#!/usr/bin/env bash
# Sets up, then trains one model without balancing, with it, and with ideal routing, and compares them.
# Arguments are overrides of recipes/quickstart.yaml, e.g. steps=100.
set -euo pipefail
case ${1:-} in -h | --help) sed -n '2,/^[^#]/s/^# \?//p' "$0" && exit ;; esac
cd "$(dirname "$0")/.."

launch/setup.sh
# On the CPU also where there are GPUs, one thread a rank: the ranks share the machine's cores.
export CUDA_VISIBLE_DEVICES='' OMP_NUM_THREADS=1
echo "loading PyTorch and Megatron ..." >&2 # Seconds in which nothing else is said.
exec "${VENV:-.venv}/bin/python" -m megatron_ext.trainer.quickstart "$@"
