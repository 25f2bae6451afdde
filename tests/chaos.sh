#!/usr/bin/env bash
# Sets up, then strikes trainings at random and compares them with undisturbed ones:
# tests/chaos.sh [--kills N] [--minutes M] [--seed S]. Status 0 if nothing differs by a bit.
set -euo pipefail
case ${1:-} in -h | --help) sed -n '2,/^[^#]/s/^# \?//p' "$0" && exit ;; esac
cd "$(dirname "$0")/.."

launch/setup.sh
export CUDA_VISIBLE_DEVICES='' OMP_NUM_THREADS=1
exec .venv/bin/python -m tests.chaos "$@"
