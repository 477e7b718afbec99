#!/usr/bin/env bash
# Puts the real etcd into .tools/etcd (etcd, etcdctl): the one of Debian 12 (bookworm), unpacked from its packages.
#
#   tools/etcd.sh                          fetch, or do nothing if it is there
#   DEBIAN_MIRROR=URL tools/etcd.sh        where apt has no Debian mirror of its own (another distribution)
set -euo pipefail

name=etcd title=etcd
without='tests that need etcd will be skipped; any etcd and etcdctl programs on PATH would do as well'
# shellcheck source=tools/debian.sh
. "$(dirname "${BASH_SOURCE[0]}")/debian.sh"

if [ -x "$target/etcdctl" ] && version=$("$target/etcd" --version 2>/dev/null | head -n 1); then
    echo "$title is there: .tools/etcd/etcd ($version)"
    exit 0
fi
fetch_packages bookworm etcd-server etcd-client
version_argument=--version install_program usr/bin/etcd
version_argument=version install_program usr/bin/etcdctl
echo "$title is at .tools/etcd/etcd ($("$target/etcd" --version | head -n 1))"
