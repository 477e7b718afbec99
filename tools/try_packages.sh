#!/usr/bin/env bash
# Install each package into a fresh environment, and run a teacher and a student there, in a folder without the sources:
#   bash tools/try_packages.sh dist/elastic_distill-*
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
unset PYTHONPATH

for package in "$@"; do
    "${PYTHON:-python3}" -m venv --clear "$folder/venv"
    "$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check "$(realpath "$package")[serving]"
    (
        cd "$folder"
        venv/bin/edl --version
        timeout 100 venv/bin/python - <<'END'
import numpy as np

from edl.distill import DistillReader
from edl.testing import LocalTeacher

samples = np.arange(24, dtype=np.float32).reshape(6, 4)
with LocalTeacher("echo") as teacher, DistillReader(ins=["x"], predicts=["y"], teachers=teacher.endpoint) as reader:
    reader.set_batch_generator(lambda: iter([(samples[:3],), (samples[3:],)]))
    labels = [label for _, label in reader()]
assert np.array_equal(np.concatenate(labels), samples), labels
END
    )
    echo "$package: installed, and a student got its labels"
done
