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
name=triton title=Triton
want="nvidia-pytriton $version"
works='import pytriton'
without='tests and benchmarks that need Triton are skipped here'
# shellcheck source=tools/environment.sh
. "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

end_if_installed
# Triton's Python backend exists for these versions, and loads libpython.
suits='
import ensurepip, pathlib, sys, sysconfig, venv
library, folder = sysconfig.get_config_var("INSTSONAME"), pathlib.Path(sysconfig.get_config_var("LIBDIR"))
places = folder, folder / str(sysconfig.get_config_var("MULTIARCH"))
shared = ".so" in library and any((place / library).exists() for place in places)
sys.exit(not (shared and (3, 10) <= sys.version_info < (3, 14)))'
make_environment "$suits" "a shared libpython, venv and ensurepip" "150 MB"
install "nvidia-pytriton==$version" "numpy<2" "tritonclient[grpc]"
# Without a shared libpython it could not start a model.
"$target/bin/python" "$root/tools/triton_server.py" --check || fail "$want was installed, but cannot run here; see above"
finish
