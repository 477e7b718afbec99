#!/usr/bin/env bash
# Puts the real Consul agent into .tools/consul/consul: the one of Debian 11 (bullseye), unpacked from its package.
#
#   tools/consul.sh                          fetch, or do nothing if it is there
#   DEBIAN_MIRROR=URL tools/consul.sh        where apt has no Debian mirror of its own (another distribution)
#
# Needs apt-get and dpkg, and no root: apt works in a folder of its own, the system's lists and packages stay as they are.
set -euo pipefail

release=bullseye
root=$(cd "$(dirname "$0")/.." && pwd)
target=$root/.tools/consul
binary=$target/consul

fail() {
    echo "tools/consul.sh: $*" >&2
    echo "tools/consul.sh: tests that need Consul will be skipped; any consul program on PATH would do as well" >&2
    exit 1
}

if [ -x "$binary" ] && version=$("$binary" version 2>/dev/null | head -n 1); then
    echo "Consul is there: .tools/consul/consul ($version)"
    exit 0
fi

for program in apt-get dpkg dpkg-deb; do
    command -v "$program" >/dev/null || fail "$program is missing: this needs Debian or a distribution made from it"
done
keyring=/usr/share/keyrings/debian-archive-keyring.gpg
[ -r "$keyring" ] || fail "$keyring is missing (package debian-archive-keyring), the download could not be verified"

mirror=${DEBIAN_MIRROR:-}
if [ -z "$mirror" ]; then
    # The mirror that this system itself installs from; the security archive has no copy of whole releases.
    mirror=$(apt-get indextargets --format '$(SITE)' 'Created-By: Packages' 'Origin: Debian' | grep -v security | head -n 1) || true
fi
if [ -z "$mirror" ]; then
    # Nothing is indexed as long as "apt-get update" has not run: read it from the source lists.
    mirror=$(apt-get indextargets --no-release-info --format '$(SITE)' 'Created-By: Packages' | grep -v security | grep '/debian/*$' | head -n 1) || true
fi
[ -n "$mirror" ] || fail "apt knows no Debian mirror: name one, DEBIAN_MIRROR=URL tools/consul.sh"

mkdir -p "$target"
work=$(mktemp -d "$target/apt.XXXXXX")
trap 'rm -rf "$work"' EXIT
mkdir -p "$work"/{state/lists/partial,cache/archives/partial,etc/preferences.d,etc/apt.conf.d,download}
: >"$work/status"
echo "deb [signed-by=$keyring] $mirror $release main" >"$work/etc/sources.list"
apt=(
    apt-get -q -o "Dir::State=$work/state" -o "Dir::State::status=$work/status" -o "Dir::Cache=$work/cache"
    -o "Dir::Etc=$work/etc" -o "Dir::Etc::sourcelist=$work/etc/sources.list" -o Dir::Etc::sourceparts=-
    -o "APT::Sandbox::User=$(id -un)" -o Acquire::Languages=none -o APT::Update::Error-Mode=any
)

echo "Fetching the package list of Debian $release from $mirror"
"${apt[@]}" update >"$work/log" 2>&1 || fail "apt could not read $mirror: $(tail -n 3 "$work/log" | tr '\n' ' ')"
echo "Fetching the package consul"
(cd "$work/download" && "${apt[@]}" download consul >"$work/log" 2>&1) ||
    fail "apt could not download consul: $(tail -n 3 "$work/log" | tr '\n' ' ')"
dpkg-deb -x "$work"/download/consul_*.deb "$work/package"
mv "$work/package/usr/bin/consul" "$binary.new"
"$binary.new" version >/dev/null 2>&1 || fail "the program in the package does not run on this machine"
mv "$binary.new" "$binary"
echo "Consul is at .tools/consul/consul ($("$binary" version | head -n 1))"
