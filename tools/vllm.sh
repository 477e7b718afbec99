#!/usr/bin/env bash
# Installs the real vLLM (for CPUs), where ../shared/vllm is there: into an environment of its own in the user's cache,
# about 3.5 GB, since it wants other versions than what is tested here; TRL, whose client asks for vLLM, beside it.
#
#   tools/vllm.sh                        install, or do nothing if it is there
#   EDL_VLLM_HOME=DIR tools/vllm.sh      install into another folder (the default: ~/.cache/edl/vllm)
#
# What was begun and not ended is begun again, and of two that run at a time the second waits for the first.
# Tests marked `vllm` start it with a small random model (tests/plugins_vllm.py).
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
source=$root/../shared/vllm
home=${EDL_VLLM_HOME:-${XDG_CACHE_HOME:-$HOME/.cache}/edl/vllm}

if [ -e "$home/complete" ]; then
    echo "vLLM is there: $home"
    exit 0
fi
if [ ! -x "$source/install" ]; then
    echo "vLLM: ../shared/vllm is not here; its tests run where EDL_VLLM_HOME names an environment with it, or are skipped"
    exit 0
fi
mkdir -p "$home"
exec 9>"$home.lock"  # beside the folder, which is made anew; held by what this starts as well
flock 9
if [ -e "$home/complete" ]; then
    echo "vLLM is there: $home"
    exit 0
fi
if [ ! -e "$home/installed" ]; then  # nothing, or what is left of an installation that was killed
    echo "Installing vLLM into $home (3.5 GB, some minutes) ..."
    if [ -n "$(ls -A "$home")" ] && [ ! -e "$home/pyvenv.cfg" ]; then
        echo "tools/vllm.sh: $home is no virtual environment: name another folder by EDL_VLLM_HOME" >&2
        exit 1
    fi
    rm -rf "$home"
    mkdir -p "$home"
    "$source/install" "$home" || {
        echo "tools/vllm.sh: $source/install failed; tests of the real vLLM are skipped" >&2
        exit 1
    }
fi
"$home/bin/python" -m pip install -qq --no-input --disable-pip-version-check trl==1.16.0 || {
    echo "tools/vllm.sh: pip could not install TRL; tests of the real vLLM are skipped" >&2
    exit 1
}
# The small model is made once: its tokenizer takes some seconds.
rm -rf "$home/tiny" "$home/tiny.new"
"$home/bin/python" "$source/tiny_model.py" "$home/tiny.new" >/dev/null
mv "$home/tiny.new" "$home/tiny"
touch "$home/complete"
