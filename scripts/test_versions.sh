#!/usr/bin/env bash
# Run the tests of the adapter under every supported megatron-core, or those in VERSIONS. Arguments go to pytest.
set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
source "$ROOT/scripts/lib/python.sh"
ensure_venv requirements-test.txt
cd "$ROOT"

for version in ${VERSIONS:-0.18.2 0.19.2}; do
    # Beside the pinned version, which keeps its dependencies: Python takes the first on its path.
    packages="$VENV/megatron-core-$version"
    if [ ! -e "$packages/megatron" ]; then
        "$VENV/bin/python" -m pip install --disable-pip-version-check --quiet --no-deps \
            --target "$packages" "megatron-core==$version" pyyaml==6.0.3  # 0.18 reads YAML without saying so.
    fi
    echo "megatron-core $version"
    PYTHONPATH="$packages" "$VENV/bin/python" -m pytest -n 2 --dist loadfile tests/mcore tests/examples "$@"
done
