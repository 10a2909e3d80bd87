#!/usr/bin/env bash
# Lint and test. Arguments go to pytest: scripts/test.sh tests/schedule -k bounds; -m slow runs what is left out.
set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
source "$ROOT/scripts/lib/python.sh"
ensure_venv requirements-test.txt
cd "$ROOT"

"$VENV/bin/ruff" check .
"$VENV/bin/ruff" format --check .
# Two files at a time: the ranks of a test wait for each other, too.
"$VENV/bin/python" -m pytest -n 2 --dist loadfile "$@"
