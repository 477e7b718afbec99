#!/usr/bin/env bash
# Installs the real vLLM (for CPUs), where ../shared/vllm is there: into an environment of its own in the user's cache,
# about 3.5 GB, since it wants other versions than what is tested here.
#
#   tools/vllm.sh                        install, or do nothing if it is there
#   EDL_VLLM_HOME=DIR tools/vllm.sh      install into another folder (the default: ~/.cache/edl/vllm)
#
# What was begun and not ended is begun again, and of two that run at a time the second waits for the first. A folder
# that has something in it and was not begun here is left as it is.
# Tests marked `vllm` start it with a small random model (tests/plugins_vllm.py).
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
source=$root/../shared/vllm
home=${EDL_VLLM_HOME:-${XDG_CACHE_HOME:-$HOME/.cache}/edl/vllm}
begun=$home/.begun-by-edl  # in a folder that is filled here: what is in it may be removed, this file last
needed_kb=5000000          # 3.5 GB, and what pip unpacks meanwhile

clear_folder() {
    find "$home/" -mindepth 1 ! -name "${begun##*/}" -delete
}

fail() {
    echo "tools/vllm.sh: $*; tests of the real vLLM fail in CI, and are skipped elsewhere" >&2
    exit 1
}

if [ -e "$home/complete" ]; then
    echo "vLLM is there: $home"
    exit 0
fi
if [ ! -x "$source/install" ]; then
    echo "vLLM: ../shared/vllm is not here; tests of the real vLLM are skipped"
    exit 0
fi
mkdir -p "$home"
exec 9>"$home.lock"  # beside the folder, which is made anew; held by what this starts as well
flock 9
if [ -e "$home/complete" ]; then
    echo "vLLM is there: $home"
    exit 0
fi
if [ -n "$(ls -A "$home")" ] && [ ! -e "$begun" ]; then
    fail "$home is not empty and was not begun by this script: name another folder by EDL_VLLM_HOME, or remove it"
fi
touch "$begun"
export PIP_NO_CACHE_DIR=1  # which would take as much again
if [ ! -e "$home/installed" ]; then  # nothing, or what is left of an installation that was killed
    clear_folder
    free_kb=$(df -Pk "$home" | awk 'NR == 2 { print $4 }')
    if [ "$free_kb" -lt "$needed_kb" ]; then
        rm -f "$begun"
        fail "$home has $free_kb KB of free space, and vLLM needs $needed_kb"
    fi
    echo "Installing vLLM into $home (3.5 GB, some minutes) ..."
    "$source/install" "$home" || {
        clear_folder
        rm -f "$begun"
        fail "$source/install failed"
    }
fi
# The small model is made once: its tokenizer takes some seconds.
rm -rf "$home/tiny" "$home/tiny.new"
"$home/bin/python" "$source/tiny_model.py" "$home/tiny.new" >/dev/null
mv "$home/tiny.new" "$home/tiny"
touch "$home/complete"
rm -f "$begun"
