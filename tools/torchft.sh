#!/usr/bin/env bash
# Puts torchft, which `benchmarks/recovery.py` compares with, into .tools/torchft: a virtual environment of its own with
# the same torch as ours, so that what torchft depends on stays away from what we test with. Its wheel brings the
# lighthouse, so that nothing else is needed, and nothing is fetched afterwards.
#
#   tools/torchft.sh           install, or do nothing if it is there
#   PYTHON=python3.12 tools/torchft.sh
set -euo pipefail

version=0.2.0
root=$(cd "$(dirname "$0")/.." && pwd)
target=$root/.tools/torchft
stamp=$target/installed
torch=$(sed -n 's/^torch==\([^ ;]*\).*/\1/p' "$root/constraints.txt")
want="torchft $version, torch $torch"
works='from torchft import Manager, ProcessGroupGloo; from torchft.coordination import LighthouseServer'

fail() {
    echo "tools/torchft.sh: $*" >&2
    exit 1
}

if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$want" ] && "$target/bin/python" -c "$works" 2>/dev/null; then
    echo "torchft is there: .tools/torchft ($want)"
    exit 0
fi

# Where torchft cannot run, the comparison with it is left out (and missing in CI): no reason not to measure the rest.
unsuitable() {
    echo "tools/torchft.sh: $*; benchmarks leave the comparison with torchft out here" >&2
    [ "${CI:-}" = true ] && exit 1
    exit 0
}

[ "$(uname -s)-$(uname -m)" = Linux-x86_64 ] || unsuitable "the wheel of torchft $version exists for Linux on x86-64 only"

suits='import ensurepip, sys, venv; sys.exit(not (3, 10) <= sys.version_info < (3, 14))'
python=
for candidate in ${PYTHON:-} "$root/.venv/bin/python" python3.11 python3.12 python3.13 python3.10 python3; do
    if command -v "$candidate" >/dev/null && "$candidate" -c "$suits" 2>/dev/null; then
        python=$candidate
        break
    fi
done
[ -n "$python" ] || unsuitable "found no Python 3.10 to 3.13 with venv and ensurepip; name one with PYTHON=..."

echo "Installing $want into .tools/torchft with $("$python" --version 2>&1) (about 250 MB to fetch) ..."
rm -rf "$target"
mkdir -p "$root/.tools"
"$python" -m venv "$target"
# torch first and alone, as in the Makefile: the build for CPUs where the package index has one.
for packages in "torch==$torch numpy" "torchft==$version"; do
    # shellcheck disable=SC2086
    "$target/bin/python" -m pip install -qq --no-input --disable-pip-version-check \
        --constraint "$root/constraints.txt" $packages ||
        fail "pip could not install $packages; see its message above. Nothing else of EDL depends on it"
done
"$target/bin/python" -c "$works" || fail "$want was installed, but cannot be imported here; see above"
echo "$want" >"$stamp"
echo "torchft is ready: .tools/torchft"
