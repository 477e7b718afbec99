#!/usr/bin/env bash
# Puts the real Triton Inference Server into .tools/triton: the one inside NVIDIA's PyTriton wheel, which needs neither
# Docker nor a GPU. It gets a virtual environment of its own, because it wants numpy below 2.
#
#   tools/triton.sh            install, or do nothing if it is there
#   PYTHON=python3.12 tools/triton.sh
#
# Afterwards `.tools/triton/bin/python tools/triton_server.py --help` starts one.
set -euo pipefail

version=0.7.0
root=$(cd "$(dirname "$0")/.." && pwd)
target=$root/.tools/triton
stamp=$target/installed
want="nvidia-pytriton $version"

fail() {
    echo "tools/triton.sh: $*" >&2
    exit 1
}

if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$want" ] && "$target/bin/python" -c "import pytriton" 2>/dev/null; then
    echo "Triton is there: .tools/triton ($want)"
    exit 0
fi

[ "$(uname -s)-$(uname -m)" = Linux-x86_64 ] || fail "the wheel of $want exists for Linux on x86-64 only; tests that need Triton will be skipped"

python=${PYTHON:-}
if [ -z "$python" ]; then
    for candidate in "$root/.venv/bin/python" python3.11 python3.12 python3.10 python3; do
        if command -v "$candidate" >/dev/null && "$candidate" -c "import venv, ensurepip" 2>/dev/null; then
            python=$candidate
            break
        fi
    done
fi
[ -n "$python" ] || fail "no Python with venv and ensurepip found; name one with PYTHON=..."
"$python" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 14))' ||
    fail "$python is $("$python" --version 2>&1); Triton's Python backend needs 3.10 to 3.13"

echo "Installing $want into .tools/triton with $("$python" --version 2>&1) (about 150 MB to fetch) ..."
rm -rf "$target"
mkdir -p "$root/.tools"
"$python" -m venv "$target"
"$target/bin/python" -m pip install --quiet "nvidia-pytriton==$version" "numpy<2" "tritonclient[grpc]" ||
    fail "pip could not install $want; see its message above. Nothing else of EDL depends on it"

# The server's Python backend loads libpython; without a shared one it could not start a model.
"$target/bin/python" "$root/tools/triton_server.py" --check || fail "$want was installed, but cannot run here; see above"
echo "$want" >"$stamp"
echo "Triton is ready: .tools/triton"
