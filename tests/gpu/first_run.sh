#!/usr/bin/env bash
# Everything that a machine with GPUs can show, in one go: tests/gpu/first_run.sh [--gpus N] [--dry-run]
# [--only PART ...] [--skip PART ...] [--out DIR]. Results are DIR/first_run.json and DIR/first_run.md
# (runs/first_run by default). Status 0 if all that ran went well; what fails does not stop the rest.
# Without GPUs it says what it would do.
set -euo pipefail
cd "$(dirname "$0")/../.."

launch/setup.sh
exec .venv/bin/python -m tests.gpu.first_run "$@"
