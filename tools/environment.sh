# For scripts that source it: a virtual environment of its own in .tools/$name, for a program that must stay away from
# what we test with. Where the program cannot run that is no reason not to test the rest, so the script then ends well,
# except in CI, where nothing may be missing.
#
# They set before: name (of the folder), title, want (what is installed, with its version), works (Python that imports
# it), without (what is left out where it cannot be).
# shellcheck shell=bash disable=SC2154
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
target=$root/.tools/$name
stamp=$target/installed

fail() {
    echo "tools/$name.sh: $*" >&2
    exit 1
}

unsuitable() {
    echo "tools/$name.sh: $*; $without" >&2
    [ "${CI:-}" = true ] && exit 1
    exit 0
}

end_if_installed() {
    if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$want" ] && "$target/bin/python" -c "$works" 2>/dev/null; then
        echo "$title is there: .tools/$name ($want)"
        exit 0
    fi
}

# make_environment PROGRAM WORDS SIZE: a new one, of a Python in which PROGRAM exits with 0; WORDS say what it asks for.
make_environment() {
    local suits=$1 words=$2 size=$3 candidate python=
    [ "$(uname -s)-$(uname -m)" = Linux-x86_64 ] || unsuitable "the wheel of $want exists for Linux on x86-64 only"
    for candidate in ${PYTHON:-} "$root/.venv/bin/python" python3.11 python3.12 python3.13 python3.10 python3; do
        if command -v "$candidate" >/dev/null && "$candidate" -c "$suits" 2>/dev/null; then
            python=$candidate
            break
        fi
    done
    [ -n "$python" ] || unsuitable "found no Python 3.10 to 3.13 with $words; name one with PYTHON=..."
    echo "Installing $want into .tools/$name with $("$python" --version 2>&1) (about $size to fetch) ..."
    rm -rf "$target"
    mkdir -p "$root/.tools"
    "$python" -m venv "$target"
}

# install PACKAGE...: with pip's options, if any.
install() {
    "$target/bin/python" -m pip install -qq --no-input --disable-pip-version-check "$@" ||
        fail "pip could not install $*; see its message above. Nothing else of EDL depends on it"
}

# The last step: what was installed works.
finish() {
    echo "$want" >"$stamp"
    echo "$title is ready: .tools/$name"
}
