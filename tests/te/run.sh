#!/usr/bin/env bash
# Runs the tests of Transformer Engine's experts: tests/te/run.sh [arguments of pytest].
# Transformer Engine is put into a folder that no other test has on its path: Megatron changes its norms
# and optimizers where it can import it. It is downloaded once (277 MB) and serves all versions of Python.
# VENV= chooses the environment.
set -euo pipefail
case ${1:-} in -h | --help) sed -n '2,/^[^#]/s/^# \?//p' "$0" && exit ;; esac
cd "$(dirname "$0")/../.."

version=$(sed -n 's/^VERSION = "\(.*\)"$/\1/p' tests/te_on_cpu.py)
folder=build/transformer_engine-$version
python=${VENV:-.venv}/bin/python
mkdir -p build
exec 9>build/.transformer_engine
flock 9 # Both versions of Python may run their tests at once.
if [[ ! -d $folder ]]; then
    # Without what they depend on: that is for a GPU, but for three small packages.
    rm -rf "$folder.part"
    "$python" -m pip --disable-pip-version-check install --quiet --no-deps --target "$folder.part" \
        "transformer_engine==$version" "transformer_engine_cu13==$version" einops importlib-metadata zipp
    mv "$folder.part" "$folder"
fi
exec 9>&-
export OMP_NUM_THREADS=1 PYTHONPATH=$PWD/$folder${PYTHONPATH:+:$PYTHONPATH}
exec "$python" -m pytest "$@" tests/te
