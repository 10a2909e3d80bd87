# Shell functions shared by the scripts: find a Python, make .venv, install pinned versions into it.
# Sourced, with $ROOT set to the repository.

VENV="$ROOT/.venv"

# Prints every Python that may be usable: on PATH first, then pyenv's versions.
python_candidates() {
    local name root
    for name in python3.12 python3.13 python3 python python3.14; do
        command -v "$name" || true
    done
    root="${PYENV_ROOT:-$(pyenv root 2>/dev/null || echo "$HOME/.pyenv")}"
    ls -d "$root"/versions/3.*/bin/python 2>/dev/null || true
}

# Prints the first Python that runs (pyenv's shims may not), can make environments and passes $1, a
# condition on v = sys.version_info.
first_python() {
    local candidate
    while read -r candidate; do
        if "$candidate" -c "import ensurepip, sys, venv; v = sys.version_info[:2]; sys.exit(not ($1))" 2>/dev/null; then
            "$candidate" -c 'import sys; print(sys.executable)'
            return 0
        fi
    done < <(python_candidates)
    return 1
}

# Prints a Python >= 3.12; prefers those that megatron-core has wheels for.
find_python() {
    first_python '(3, 12) <= v <= (3, 13)' || first_python 'v >= (3, 12)' || {
        cat >&2 <<'MESSAGE'
error: found no Python >= 3.12 that can make virtual environments, neither on PATH nor among pyenv's versions.
Install one, for example with `pyenv install 3.12`, or on Debian and Ubuntu with
`apt-get install python3.12 python3.12-venv`, and run this script again.
MESSAGE
        return 1
    }
}

# Of pip's output, the packages with their sizes.
show_downloads() {
    awk '/^ *(Downloading|Using cached) .*\.whl \(/ { print "  " $0; fflush() }
         /^Installing collected/ { print "  unpacking ..."; fflush() }'
}

# ensure_venv REQUIREMENTS: .venv with the file's versions and this package in it; skipped when done already.
ensure_venv() {
    local requirements="$ROOT/$1" sum stamp python
    # A repository that was moved or copied is another one: its environment still has the package of the old place.
    sum="$({ cat "$ROOT"/requirements*.txt "$ROOT/setup.py" && echo "$ROOT"; } | cksum | cut -d ' ' -f 1)"
    stamp="$VENV/installed-$sum-$1"
    if [ -e "$stamp" ] && "$VENV/bin/python" -c "" 2>/dev/null; then
        return 0
    fi
    if ! "$VENV/bin/python" -c 'import pip, sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null; then
        if [ -n "$(ls -A "$VENV" 2>/dev/null)" ] && ! compgen -G "$VENV/installed-*" >/dev/null; then
            echo "error: $VENV has no working Python >= 3.12 with pip, and these scripts did not make it: move it away" >&2
            return 1
        fi
        python="$(find_python)" || return 1
        echo "making .venv with $("$python" --version)"
        mkdir -p "$VENV"
        find "$VENV/" -mindepth 1 -delete
        touch "$VENV/installed-nothing" # Whoever stops this here finds it again as ours.
        "$python" -m venv "$VENV"
    fi
    find "$VENV" -maxdepth 1 -name "installed-*" ! -name "installed-$sum-*" -delete
    echo "installing the versions in $1 (torch is large: this takes a minute or two) ..."
    "$VENV/bin/python" -m pip install --disable-pip-version-check --progress-bar off -r "$requirements" | show_downloads
    "$VENV/bin/python" -m pip install --disable-pip-version-check --quiet --no-build-isolation --no-deps -e "$ROOT"
    touch "$stamp"
}
