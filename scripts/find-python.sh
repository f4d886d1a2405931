#!/bin/sh
# Prints the path of a Python that can make the environment, or says on stderr why there is none and exits with 1.
# Looks at $PYTHON; python3.12, python3.13, python3.14 and python3 on the PATH; then the versions pyenv has installed.
# Uses nothing but the shell, so that it runs on a machine that has only git and make.

# The versions that the pinned torch has wheels for, the best tested one first.
versions="3.12 3.13 3.14"
seen=""

# Sets $answer to the candidate's version; to "" if it does not run (a pyenv shim without its version, say); to
# "3.12 without venv" if it lacks a module that making an environment takes (Debian splits it off).
probe() {
    answer=$("$1" -c 'import importlib.util as u, sys
lacks = "" if all(map(u.find_spec, ("venv", "ensurepip"))) else " without venv"
print("%d.%d" % sys.version_info[:2] + lacks)' 2>/dev/null) || answer=""
}

fits() {
    for version in $versions; do
        [ "$answer" = "$version" ] && return 0
    done
    return 1
}

# Prints the candidate and ends the script if it fits; notes what it is if not.
try() {
    probe "$1"
    if fits; then
        printf '%s\n' "$1"
        exit 0
    fi
    [ -z "$answer" ] || seen="$seen
  $1 is Python $answer"
}

if [ -n "${PYTHON:-}" ]; then
    path=$(command -v "$PYTHON") || path=$PYTHON
    try "$path"
    echo "PYTHON=$PYTHON is ${answer:-not a Python that runs}: Maniple needs Python 3.12, 3.13 or 3.14 with its venv module." >&2
    exit 1
fi

for name in python3.12 python3.13 python3.14 python3; do
    if path=$(command -v "$name"); then
        try "$path"
    fi
done

for version in $versions; do
    for path in "${PYENV_ROOT:-${HOME:-}/.pyenv}/versions/$version"*/bin/python; do
        if [ -x "$path" ]; then
            try "$path"
        fi
    done
done

echo "Maniple needs Python 3.12, 3.13 or 3.14 with its venv module. Found on the PATH and under pyenv:${seen:- none at all}
Get one in one of these ways, then say \`make env\` again as shown:
  pyenv install 3.12            make env
  uv python install 3.12        make env PYTHON=\$(uv python find --system 3.12)
  conda create -n py312 python=3.12
                                make env PYTHON=\$(conda run -n py312 which python)
  one that is there already     make env PYTHON=/where/it/is/python3" >&2
exit 1
