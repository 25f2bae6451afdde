#!/usr/bin/env bash
# Everything that a machine with GPUs can show, in one go: tests/gpu/first_run.sh [--gpus N] [--dry-run]
# [--minutes N] [--go-on] [--only PART ...] [--skip PART ...] [--out DIR]. Results are DIR/first_run.json and
# DIR/first_run.md (runs/first_run by default). Status 0 if all that ran went well; what fails does not stop the
# rest. Without GPUs it says what it would do. --minutes ends it after so many; --go-on leaves out what has passed,
# and begins with what has not run.
#
# Without a network: elsewhere, by the same version of Python, collect the packages into a folder,
#     python -m pip wheel --no-deps --wheel-dir wheels -r tests/gpu/first_run/packages.txt
# and bring it. The machine has nvcc, a C++ compiler, and a Python with torch, numpy and pytest:
#     FIRST_RUN_PYTHON=python3 FIRST_RUN_WHEELS=wheels tests/gpu/first_run.sh
set -euo pipefail
case ${1:-} in -h | --help) sed -n '2,/^[^#]/s/^# \?//p' "$0" && exit ;; esac
cd "$(dirname "$0")/../.."

python=.venv/bin/python
if [[ -z ${FIRST_RUN_PYTHON:-} ]]; then
    launch/setup.sh
else
    python=$FIRST_RUN_PYTHON
    beside=build/first_run # What that Python does not have; the native part is built at first use.
    if [[ ! -f $beside/ready ]]; then
        rm -rf "$beside"
        "$python" -m pip --disable-pip-version-check install --no-index --no-deps --target "$beside" \
            --find-links "${FIRST_RUN_WHEELS:?the folder of the wheels}" -r tests/gpu/first_run/packages.txt
        touch "$beside/ready"
    fi
    export PYTHONPATH="$PWD/$beside${PYTHONPATH:+:$PYTHONPATH}" PATH="$PWD/$beside/bin:$PATH"
fi
exec "$python" -m tests.gpu.first_run "$@"
