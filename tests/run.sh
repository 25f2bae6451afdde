#!/usr/bin/env bash
# Sets up and runs all tests: tests/run.sh [--python VERSION] [arguments of pytest].
# With --python the tests run in an environment of their own, .venv-VERSION.
set -euo pipefail
cd "$(dirname "$0")/.."

if [[ ${1:-} == --python ]]; then
    version=${2:?--python needs a version, e.g. 3.12}
    shift 2
    PYTHON=$(launch/find_python.sh "$version") || {
        echo "tests/run.sh: there is no Python $version in PATH or pyenv" >&2
        exit 1
    }
    export PYTHON VENV=.venv-$version
fi
venv=${VENV:-.venv}
launch/setup.sh

export OMP_NUM_THREADS=1
"$venv/bin/ruff" check .
"$venv/bin/ruff" format --check .
"$venv/bin/mypy"
# Everything but measurements.
exec "$venv/bin/python" -m pytest -m "not perf" "$@"
