#!/usr/bin/env bash
# Sets up and runs all tests: tests/run.sh [--quick] [--python VERSION] [arguments of pytest].
# With --quick it runs those of the method, the plug-in and the documents that are not slow.
# With --python the tests run in an environment of their own, .venv-VERSION. Lint, format and types, which
# depend on no version, are left to the run without. So they are where the tests to run are named.
set -euo pipefail
case ${1:-} in -h | --help) sed -n '2,/^[^#]/s/^# \?//p' "$0" && exit ;; esac
cd "$(dirname "$0")/.."

chosen=()
while [[ ${1:-} == --quick || ${1:-} == --python ]]; do
    if [[ $1 == --quick ]]; then
        chosen=(
            -m "not slow and not perf"
            tests/balance tests/transport tests/mcore tests/docs tests/test_*.py
            megatron_ext/balance megatron_ext/transport megatron_ext/mcore/measure.py
        )
        shift
        continue
    fi
    version=${2:?--python needs a version, e.g. 3.12}
    shift 2
    PYTHON=$(launch/find_python.sh "$version") || {
        echo "tests/run.sh: there is no Python $version in PATH or pyenv" >&2
        exit 1
    }
    export PYTHON VENV=.venv-$version
done
venv=${VENV:-.venv}

# Jobs are tried on a Slurm of the tests' own, scripts with shellcheck, pages in Chromium; where these
# are not to be had, such tests are skipped. They are installed beside the set-up.
install_packages() {
    mkdir -p build
    exec 9>build/.packages
    flock 9 # Both versions of Python may run their tests at once, and a set-up may install a compiler.
    if ! { command -v slurmctld && command -v shellcheck && command -v chromium; } >/dev/null; then
        {
            apt-get -qq update
            DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends \
                --option DPkg::Lock::Timeout=300 slurm-wlm munge shellcheck chromium >/dev/null
        } || echo "tests/run.sh: Slurm, shellcheck and Chromium could not be installed" >&2
    fi
}
if ((${#chosen[@]} == 0)) && [[ $(id -u) == 0 ]] && command -v apt-get >/dev/null; then
    install_packages &
fi
launch/setup.sh
wait
# Megatron-Core since 0.19 compiles this at its first use: on a slow machine for longer than a test's ranks may take, and
# the lock of a compiler that was killed with them would hold up all later ones for ever.
if grep -qs _get_share_storage "$venv"/lib/python*/site-packages/megatron/core/tensor_parallel/random.py; then
    "$venv/bin/python" -c 'from megatron.core.tensor_parallel.random import _get_share_storage as get; get()'
fi

export OMP_NUM_THREADS=1
named=
[[ ! -e ${1:-} ]] || named=yes
if [[ ! ${version:-} && ! $named ]]; then
    "$venv/bin/ruff" check .
    "$venv/bin/ruff" format --check .
    "$venv/bin/mypy" --cache-dir "$venv/.mypy_cache" --show-traceback
fi
# CPU ranks stand in for GPUs, also where there are some; what needs those has a run of its own.
if [[ ! $named ]] && "$venv/bin/python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    "$venv/bin/python" -m pytest -m gpu tests/gpu tests/ops
fi
export CUDA_VISIBLE_DEVICES=
# Measurements (`perf`) are left out by the settings in pyproject.toml. Tests of Transformer Engine have
# processes of their own, where Megatron finds it; not when the tests to run are named.
status=0
left_out=()
for word in "$@"; do [[ $word != --ignore=* ]] || left_out+=("$word"); done
[[ $named ]] || VENV=$venv tests/te/run.sh "${chosen[@]:0:2}" "${left_out[@]}" || status=$?
"$venv/bin/python" -m pytest "${chosen[@]}" "$@"
exit "$status"
