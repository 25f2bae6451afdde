#!/usr/bin/env bash
# Makes the environment .venv at the root of the repository and builds the native library in it.
# Does nothing when that is done. PYTHON= chooses the interpreter, VENV= another folder.
set -euo pipefail
cd "$(dirname "$0")/.."

fail() {
    echo "launch/setup.sh: $*" >&2
    exit 1
}

python=${PYTHON:-$(launch/find_python.sh)} ||
    fail "Python 3.11 or later is needed; PYTHON=/path/to/python launch/setup.sh chooses one"
version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])') ||
    fail "PYTHON=$python does not run"
[[ $version == 3.1[1-9] ]] || fail "PYTHON=$python is Python $version; 3.11 or later is needed"
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

install_packages() { # of Debian and its relatives, as root
    command -v apt-get >/dev/null || fail "$1 is missing: install it and run this again"
    local sudo=()
    [[ $(id -u) == 0 ]] || sudo=(sudo)
    "${sudo[@]}" apt-get update
    DEBIAN_FRONTEND=noninteractive "${sudo[@]}" apt-get install -y --no-install-recommends "${@:2}"
}

command -v c++ >/dev/null || install_packages "a C++ compiler" g++
"$python" -c 'import ensurepip, venv' 2>/dev/null ||
    install_packages "Python's module venv" "python$version-venv"

if [[ ! -x $venv/bin/python ]] ||
    [[ $("$venv/bin/python" -c 'import sys; print("%d.%d" % sys.version_info[:2])') != "$version" ]]; then
    "$python" -m venv --clear "$venv"
fi
pip=("$venv/bin/python" -m pip --disable-pip-version-check)

# Torch comes first with what builds: the library is built against the one that is there.
"${pip[@]}" install --constraint launch/constraints.txt torch scikit-build-core cmake ninja
"${pip[@]}" install --constraint launch/constraints.txt --no-build-isolation --editable '.[dev,wandb]'
echo "$stamp" >"$venv/setup-stamp"
