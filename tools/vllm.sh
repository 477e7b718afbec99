#!/usr/bin/env bash
# Installs the real vLLM (for CPUs), where ../shared/vllm is there: into an environment of its own in the user's cache,
# about 3.5 GB, since it wants other versions than what is tested here.
#
#   tools/vllm.sh                        install, or do nothing if it is there
#   EDL_VLLM_HOME=DIR tools/vllm.sh      install into another folder (the default: ~/.cache/edl/vllm)
#
# Tests marked `vllm` start it with a small random model (tests/plugins_vllm.py).
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
install=$root/../shared/vllm/install
home=${EDL_VLLM_HOME:-${XDG_CACHE_HOME:-$HOME/.cache}/edl/vllm}

if [ -e "$home/installed" ]; then
    echo "vLLM is there: $home"
elif [ ! -x "$install" ]; then
    echo "vLLM: ../shared/vllm is not here; its tests run where EDL_VLLM_HOME names an environment with it, or are skipped"
    exit 0
else
    echo "Installing vLLM into $home (3.5 GB, some minutes) ..."
    mkdir -p "$home"
    "$install" "$home" || {
        echo "tools/vllm.sh: $install failed; tests of the real vLLM are skipped" >&2
        exit 1
    }
fi
# The small model is made once: its tokenizer takes some seconds.
model=$root/../shared/vllm/tiny_model.py
if [ ! -e "$home/tiny/model.safetensors" ] && [ -f "$model" ]; then
    "$home/bin/python" "$model" "$home/tiny.new" >/dev/null
    rm -rf "$home/tiny"
    mv "$home/tiny.new" "$home/tiny"
fi
