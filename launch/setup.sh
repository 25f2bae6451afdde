#!/usr/bin/env bash
# Makes the environment .venv at the root of the repository and builds the native library in it.
# Does nothing when that is done. PYTHON= chooses the interpreter, VENV= another folder.
set -euo pipefail
case ${1:-} in -h | --help) sed -n '2,/^[^#]/s/^# \?//p' "$0" && exit ;; esac
cd "$(dirname "$0")/.."

fail() {
    echo "launch/setup.sh: $*" >&2
    exit 1
}

[[ -f pyproject.toml ]] ||
    fail "an installed package has its environment; python -m megatron_ext.trainer.quickstart runs the quickstart in it"
python=${PYTHON:-$(launch/find_python.sh)} ||
    fail "Python 3.11 or later is needed; PYTHON=/path/to/python launch/setup.sh chooses one"
version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])') ||
    fail "PYTHON=$python does not run"
[[ $version == 3.1[1-9] ]] || fail "PYTHON=$python is Python $version; 3.11 or later is needed"
# In an active environment `python3` is the environment's: the one that it was made of is the same inside and outside.
python=$("$python" -c 'import os, sys; print(os.path.realpath(sys._base_executable))')
venv=${VENV:-.venv}

# What the environment is made of: when none of it changed since the last setup, there is nothing to do.
# `cat` in a fixed order, so that equal files give an equal sum.
stamp=$( (
    echo "$python $version"
    cat pyproject.toml launch/setup.sh launch/constraints.txt
    find csrc -type f | LC_ALL=C sort | xargs cat
    # The editable installation finds modules where they were: their names, not what is in them.
    find megatron_ext checkpoints_tools -name '*.py' | LC_ALL=C sort
) | sha256sum)
if [[ -f $venv/setup-stamp && $(<"$venv/setup-stamp") == "$stamp" ]]; then
    exit 0
fi

output=$(mktemp)
trap 'rm -f "$output"' EXIT
stage() { # stage TITLE COMMAND...: shows a line; what the command says only if it fails
    local started=$SECONDS
    printf '%s ... ' "$1"
    if ! "${@:2}" >"$output" 2>&1; then
        echo failed
        cat "$output" >&2
        fail "$1: failed; what it said is above"
    fi
    echo "$((SECONDS - started)) s"
}

install_packages() { # of Debian and its relatives, as root
    local sudo=()
    [[ $(id -u) == 0 ]] || sudo=(sudo)
    "${sudo[@]}" apt-get update &&
        DEBIAN_FRONTEND=noninteractive "${sudo[@]}" apt-get install -y --no-install-recommends "$@"
}

need() { # need WHAT PACKAGE: it is missing
    command -v apt-get >/dev/null || fail "$1 is missing: install it and run this again"
    mkdir -p build
    exec 9>build/.packages
    flock 9 # Another set-up, or tests/run.sh, may install at this moment.
    stage "0/3 $1 (apt-get install $2)" install_packages "$2"
    exec 9>&-
}

echo "Setting up $venv with Python $version; 5 to 10 minutes, most of them downloads."
command -v c++ >/dev/null || need "a C++ compiler" g++
"$python" -c 'import ensurepip, venv' 2>/dev/null || need "Python's module venv" "python$version-venv"

make_environment() {
    [[ -x $venv/bin/python &&
        $("$venv/bin/python" -c 'import sys; print("%d.%d" % sys.version_info[:2])') == "$version" ]] ||
        "$python" -m venv --clear "$venv"
}
stage "1/3 environment" make_environment

install() { # install ARGUMENTS: by pip
    "$venv/bin/python" -m pip --disable-pip-version-check install --constraint launch/constraints.txt "$@"
}
# Torch comes first with what builds: the library is built against the one that is there.
stage "2/3 torch, up to 3 GB" install torch scikit-build-core cmake ninja
# All extras but `te`, which needs CUDA to be built; what others need beside these is in `dev`.
# The extra `hf` is empty but for Python 3.12, which Megatron-Bridge needs. Bridge itself would bring
# all that its training wants.
install_rest() {
    install --no-build-isolation --editable '.[train,dev,dashboards,docs,hf,wandb]' &&
        { [[ $version != 3.12 ]] || install --no-deps megatron-bridge==0.6.2; }
}
stage "3/3 other packages and the native part" install_rest
echo "$stamp" >"$venv/setup-stamp"
echo "Ready. To use it: source $venv/bin/activate"
