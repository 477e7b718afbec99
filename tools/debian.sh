# shellcheck shell=bash
# Sourced by scripts that fetch a program of Debian's into .tools. The script sets before:
#
#   name title       the folder below .tools, and how people call the program
#   without          what becomes of tests without it
#
# Needs apt-get and dpkg, and no root: apt works in a folder of its own, the system's lists and packages stay as they are.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
target=$root/.tools/$name
me=tools/$name.sh

fail() {
    echo "$me: $*" >&2
    echo "$me: $without" >&2
    exit 1
}

# fetch_packages RELEASE PACKAGE...: unpacks the packages of a Debian release into $work/package.
fetch_packages() {
    local release=$1 keyring=/usr/share/keyrings/debian-archive-keyring.gpg mirror program
    shift
    for program in apt-get dpkg dpkg-deb; do
        command -v "$program" >/dev/null || fail "$program is missing: this needs Debian or a distribution made from it"
    done
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
    [ -n "$mirror" ] || fail "apt knows no Debian mirror: name one, DEBIAN_MIRROR=URL $me"

    mkdir -p "$target"
    work=$(mktemp -d "$target/apt.XXXXXX")
    trap 'rm -rf "$work"' EXIT
    mkdir -p "$work"/{state/lists/partial,cache/archives/partial,etc/preferences.d,etc/apt.conf.d,download}
    : >"$work/status"
    echo "deb [signed-by=$keyring] $mirror $release main" >"$work/etc/sources.list"
    local apt=(
        apt-get -q -o "Dir::State=$work/state" -o "Dir::State::status=$work/status" -o "Dir::Cache=$work/cache"
        -o "Dir::Etc=$work/etc" -o "Dir::Etc::sourcelist=$work/etc/sources.list" -o Dir::Etc::sourceparts=-
        -o "APT::Sandbox::User=$(id -un)" -o Acquire::Languages=none -o APT::Update::Error-Mode=any
    )

    echo "Fetching the package list of Debian $release from $mirror"
    "${apt[@]}" update >"$work/log" 2>&1 || fail "apt could not read $mirror: $(tail -n 3 "$work/log" | tr '\n' ' ')"
    echo "Fetching $*"
    (cd "$work/download" && "${apt[@]}" download "$@" >"$work/log" 2>&1) ||
        fail "apt could not download $*: $(tail -n 3 "$work/log" | tr '\n' ' ')"
    for program in "$work"/download/*.deb; do
        dpkg-deb -x "$program" "$work/package"
    done
}

# install_program PATH: puts a program of $work/package into $target, if it runs.
install_program() {
    local program=$target/${1##*/}
    mv "$work/package/$1" "$program.new"
    "$program.new" "${version_argument:-version}" >/dev/null 2>&1 || fail "${1##*/} of the package does not run on this machine"
    mv "$program.new" "$program"
}
