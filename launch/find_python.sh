#!/usr/bin/env bash
# Prints the path of a Python interpreter: find_python.sh 3.12 (that version) or without an argument
# (3.11 or later, `python3` if it is). Looks in PATH and in pyenv. Status 1 if there is none.
set -euo pipefail

works() { # works COMMAND [VERSION]: it runs, it is new enough, and it is that version
    "$1" - "${2:-}" 2>/dev/null <<'PYTHON'
import sys
asked = sys.argv[1]
version = "%d.%d" % sys.version_info[:2]
sys.exit(0 if sys.version_info >= (3, 11) and asked in ("", version) else 1)
PYTHON
}

wanted=${1:-}
candidates=(python3 python3.12 python3.11 python3.13 python3.14)
[[ -n $wanted ]] && candidates=("python$wanted" python3)
for candidate in "${candidates[@]}" "${PYENV_ROOT:-$HOME/.pyenv}"/versions/"$wanted"*/bin/python; do
    # A pyenv shim is found in PATH also for versions that are not selected: then it does not run.
    if works "$candidate" "$wanted"; then
        # In an active environment, as .venv is after `source`, the interpreter that it was made with.
        "$candidate" -c 'import os, sys; print(os.path.realpath(sys._base_executable))'
        exit 0
    fi
done
exit 1
