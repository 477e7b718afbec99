#!/usr/bin/env bash
# Puts Ray Train, which `benchmarks/recovery.py` compares with, into .tools/ray: a virtual environment of its own with
# the same torch as ours, so that what Ray depends on stays away from what we test with.
#
#   tools/ray.sh           install, or do nothing if it is there
#   PYTHON=python3.12 tools/ray.sh
set -euo pipefail

here=$(dirname "${BASH_SOURCE[0]}")
version=2.60.0
torch=$(sed -n 's/^torch==\([^ ;]*\).*/\1/p' "$here/../constraints.txt")
name=ray title="Ray Train"
want="ray $version, torch $torch"
works='import ray.train.torch; from ray.train import ScalingConfig; ScalingConfig(num_workers=(1, 3))'
without='benchmarks leave the comparison with Ray Train out here'
# shellcheck source=tools/environment.sh
. "$here/environment.sh"

end_if_installed
suits='import ensurepip, sys, venv; sys.exit(not (3, 10) <= sys.version_info < (3, 14))'
make_environment "$suits" "venv and ensurepip" "900 MB"
# torch first and alone, as in the Makefile: the build for CPUs where the package index has one.
install --constraint "$root/constraints.txt" "torch==$torch" numpy
install "ray[train]==$version"
"$target/bin/python" -c "$works" || fail "$want was installed, but cannot be imported here; see above"
finish
