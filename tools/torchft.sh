#!/usr/bin/env bash
# Puts torchft, which `benchmarks/recovery.py` compares with, into .tools/torchft: a virtual environment of its own with
# the same torch as ours, so that what torchft depends on stays away from what we test with. Its wheel brings the
# lighthouse, so that nothing else is needed, and nothing is fetched afterwards.
#
#   tools/torchft.sh           install, or do nothing if it is there
#   PYTHON=python3.12 tools/torchft.sh
set -euo pipefail

here=$(dirname "${BASH_SOURCE[0]}")
version=0.2.0
torch=$(sed -n 's/^torch==\([^ ;]*\).*/\1/p' "$here/../constraints.txt")
name=torchft title=torchft
want="torchft $version, torch $torch"
works='from torchft import Manager, ProcessGroupGloo; from torchft.coordination import LighthouseServer'
without='benchmarks leave the comparison with torchft out here'
# shellcheck source=tools/environment.sh
. "$here/environment.sh"

end_if_installed
suits='import ensurepip, sys, venv; sys.exit(not (3, 10) <= sys.version_info < (3, 14))'
make_environment "$suits" "venv and ensurepip" "250 MB"
# torch first and alone, as in the Makefile: the build for CPUs where the package index has one.
install --constraint "$root/constraints.txt" "torch==$torch" numpy
install --constraint "$root/constraints.txt" "torchft==$version"
"$target/bin/python" -c "$works" || fail "$want was installed, but cannot be imported here; see above"
finish
