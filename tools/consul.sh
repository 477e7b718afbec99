#!/usr/bin/env bash
# Puts the real Consul agent into .tools/consul/consul: the one of Debian 11 (bullseye), unpacked from its package.
#
#   tools/consul.sh                          fetch, or do nothing if it is there
#   DEBIAN_MIRROR=URL tools/consul.sh        where apt has no Debian mirror of its own (another distribution)
set -euo pipefail

name=consul title=Consul
without='tests that need Consul will be skipped; any consul program on PATH would do as well'
# shellcheck source=tools/debian.sh
. "$(dirname "${BASH_SOURCE[0]}")/debian.sh"

if [ -x "$target/consul" ] && version=$("$target/consul" version 2>/dev/null | head -n 1); then
    echo "$title is there: .tools/consul/consul ($version)"
    exit 0
fi
fetch_packages bullseye consul
install_program usr/bin/consul
echo "$title is at .tools/consul/consul ($("$target/consul" version | head -n 1))"
