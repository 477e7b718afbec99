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

# Where Triton cannot run, what needs it is skipped (and fails in CI): that is no reason not to test the rest.
unsuitable() {
    echo "tools/triton.sh: $*; tests and benchmarks that need Triton are skipped here" >&2
    [ "${CI:-}" = true ] && exit 1
    exit 0
}

[ "$(uname -s)-$(uname -m)" = Linux-x86_64 ] || unsuitable "the wheel of $want exists for Linux on x86-64 only"

# Triton's Python backend exists for these versions, and loads libpython.
suits='
import ensurepip, pathlib, sys, sysconfig, venv
library, folder = sysconfig.get_config_var("INSTSONAME"), pathlib.Path(sysconfig.get_config_var("LIBDIR"))
places = folder, folder / str(sysconfig.get_config_var("MULTIARCH"))
shared = ".so" in library and any((place / library).exists() for place in places)
sys.exit(not (shared and (3, 10) <= sys.version_info < (3, 14)))'
python=
for candidate in ${PYTHON:-} "$root/.venv/bin/python" python3.11 python3.12 python3.13 python3.10 python3; do
    if command -v "$candidate" >/dev/null && "$candidate" -c "$suits" 2>/dev/null; then
        python=$candidate
        break
    fi
done
[ -n "$python" ] || unsuitable "found no Python 3.10 to 3.13 with a shared libpython, venv and ensurepip; name one with PYTHON=..."

echo "Installing $want into .tools/triton with $("$python" --version 2>&1) (about 150 MB to fetch) ..."
rm -rf "$target"
mkdir -p "$root/.tools"
"$python" -m venv "$target"
"$target/bin/python" -m pip install -qq "nvidia-pytriton==$version" "numpy<2" "tritonclient[grpc]" ||
    fail "pip could not install $want; see its message above. Nothing else of EDL depends on it"

# The server's Python backend loads libpython; without a shared one it could not start a model.
"$target/bin/python" "$root/tools/triton_server.py" --check || fail "$want was installed, but cannot run here; see above"
echo "$want" >"$stamp"
echo "Triton is ready: .tools/triton"
