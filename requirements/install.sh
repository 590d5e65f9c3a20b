#!/bin/sh
# requirements/install.sh VENV FILE...: makes the virtual environment VENV if there is none. Installs the requirement
# FILEs into it, and the checkout in editable form. Skips files that are already installed.
set -eu
cd "$(dirname "$0")/.."
venv=$1
shift

say() { echo "install: $*" >&2; }

new_enough() { # new_enough PYTHON: whether the command is Python 3.12 or newer
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 12))' >/dev/null 2>&1
}

candidates() { # commands in order of preference; missing or old ones are skipped later
    printf '%s\n' ${PYTHON:+"$PYTHON"} python3.12 python3.13 python3.14 python3 python
    for root in ${PYENV_ROOT:+"$PYENV_ROOT"} "${HOME:-}/.pyenv"; do
        ls -d "$root"/versions/3.1[2-4].*/bin/python 2>/dev/null || true
    done
    uv python find --no-project '>=3.12' 2>/dev/null || true
}

usable() { [ -x "$venv/bin/python" ] && new_enough "$venv/bin/python" && "$venv/bin/python" -m pip --version >/dev/null 2>&1; }

make_venv() {
    usable && return
    rm -rf "$venv"
    [ -z "${PYTHON:-}" ] || new_enough "$PYTHON" || say "PYTHON=$PYTHON is not Python 3.12 or newer: looking elsewhere"
    candidates | while read -r python; do
        new_enough "$python" || continue
        say "$venv with $("$python" --version) ($python)"
        "$python" -m venv "$venv" >/dev/null 2>&1 && usable && break
        rm -rf "$venv" # happens to a Debian python without its venv package: try the next
    done
    usable && return
    # There is no interpreter here. uv downloads one if it can.
    uv venv --quiet --python 3.12 --seed "$venv" 2>/dev/null && usable && return
    say "no Python 3.12 or newer with a working venv module (looked on PATH, in pyenv, through uv)."
    say "Install one (for example: pyenv install 3.12), or name it: make PYTHON=/path/to/python3.12"
    exit 1
}

pip_install() { # uv is faster and shares packages between environments; pip works, too
    if uv --version >/dev/null 2>&1; then
        uv pip install --quiet --python "$venv/bin/python" "$@" && return
        say "uv failed; once more with pip"
    fi
    # Bytecode is made when a module is first imported, which most modules of these packages never are.
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-compile "$@"
}

make_venv

# The stamp of a requirement file is a copy of the file.
for file in "$@"; do
    stamp=$venv/installed-$(basename "$file")
    cmp -s "$file" "$stamp" && continue
    say "packages of $file"
    # No --upgrade: it makes uv download all packages again (5 GB per installation), even if its cache has them.
    pip_install --no-deps -r "$file"
    cp "$file" "$stamp"
done

# The stamp of the checkout is its path and its pyproject.toml.
stamp=$venv/installed-dhelix
if ! { pwd && cat pyproject.toml; } | cmp -s - "$stamp"; then
    say "dhelix from $(pwd)"
    pip_install --no-deps --no-build-isolation --editable .
    mkdir -p "$venv/dhelix_path" # pyright runs there, see [tool.pyright] in pyproject.toml
    ln -sfn "$(pwd)" "$venv/dhelix_path/dhelix"
    ln -sfn "$(pwd)/pyproject.toml" "$venv/dhelix_path/pyproject.toml"
    { pwd && cat pyproject.toml; } >"$stamp"
fi
