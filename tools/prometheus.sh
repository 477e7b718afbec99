#!/usr/bin/env bash
# Puts the real Prometheus into .tools/prometheus (prometheus, promtool): the one of Debian 12 (bookworm), unpacked from
# its package.
#
#   tools/prometheus.sh                          fetch, or do nothing if it is there
#   DEBIAN_MIRROR=URL tools/prometheus.sh        where apt has no Debian mirror of its own (another distribution)
set -euo pipefail

name=prometheus title=Prometheus
without='tests that need Prometheus will be skipped; any prometheus and promtool programs on PATH would do as well'
# shellcheck source=tools/debian.sh
. "$(dirname "${BASH_SOURCE[0]}")/debian.sh"

if [ -x "$target/promtool" ] && version=$("$target/prometheus" --version 2>&1 | head -n 1); then
    echo "$title is there: .tools/prometheus/prometheus ($version)"
    exit 0
fi
fetch_packages bookworm prometheus
version_argument=--version install_program usr/bin/prometheus
version_argument=--version install_program usr/bin/promtool
echo "$title is at .tools/prometheus/prometheus ($("$target/prometheus" --version 2>&1 | head -n 1))"
