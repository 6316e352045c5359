#!/usr/bin/env bash
# Make .venv with Python 3.12 and the pinned, known-good versions, unless it is there already. Needs no activation.
set -euo pipefail
cd "$(dirname "$0")/.."

find_python() {
    for candidate in "${PYTHON:-}" python3.12 "$HOME"/.pyenv/versions/3.12*/bin/python python3 python; do
        if [ -n "$candidate" ] && "$candidate" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    echo "setup: no Python 3.12 found; install one, or set PYTHON to it" >&2
    exit 1
}

stamp=.venv/requirements.stamp
if [ ! -f "$stamp" ] || ! cmp -s <(cat pyproject.toml constraints.txt) "$stamp"; then
    [ -x .venv/bin/python ] || "$(find_python)" -m venv .venv
    echo "setup: installing into .venv (about 5 GB, torch is most of it)" >&2
    .venv/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[cli,train,torch,triton,dev]'
    cat pyproject.toml constraints.txt >"$stamp"
fi
