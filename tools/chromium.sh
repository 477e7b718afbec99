#!/usr/bin/env bash
# Puts a headless Chromium into .tools/chromium/bin/chromium: that of Debian 12 (bookworm), with the libraries and the
# fonts that a machine without a desktop lacks, unpacked from its packages.
#
#   tools/chromium.sh                       fetch (about 100 MB), or do nothing if it is there
#   DEBIAN_MIRROR=URL tools/chromium.sh     where apt has no Debian mirror of its own (another distribution)
set -euo pipefail

name=chromium title=Chromium
without='tests that look at the dashboard in a browser will be skipped; chromium, chromium-headless-shell or google-chrome on PATH would do as well'
# shellcheck source=tools/debian.sh
. "$(dirname "${BASH_SOURCE[0]}")/debian.sh"

if [ -x "$target/bin/chromium" ] && version=$("$target/bin/chromium" --version 2>/dev/null); then
    echo "$title is there: .tools/chromium/bin/chromium ($version)"
    exit 0
fi
# The further lines: libraries that it loads, and these load, without those of a desktop's graphics; and fonts.
fetch_packages bookworm chromium-headless-shell chromium-common \
    libasound2 libasyncns0 libatk1.0-0 libatspi2.0-0 libblkid1 libbrotli1 libbsd0 libcap2 libdav1d6 libdbus-1-3 \
    libdouble-conversion3 libdrm2 libexpat1 libffi8 libflac12 libfontconfig1 libfreetype6 libgbm1 libgcrypt20 \
    libgcc-s1 libglib2.0-0 libgpg-error0 libgraphite2-3 libharfbuzz-subset0 libharfbuzz0b libjpeg62-turbo liblz4-1 liblzma5 libmd0 \
    libminizip1 libmount1 libmp3lame0 libmpg123-0 libnspr4 libnss3 libogg0 libopenh264-7 libopus0 libpcre2-8-0 libpng16-16 \
    libpulse0 libselinux1 libsndfile1 libsqlite3-0 libstdc++6 libsystemd0 libudev1 libvorbis0a libvorbisenc2 libwayland-server0 \
    libx11-6 libx11-xcb1 libxau6 libxcb-randr0 libxcb1 libxcomposite1 libxdamage1 libxdmcp6 libxext6 libxfixes3 libxi6 \
    libxkbcommon0 libxnvctrl0 libxrandr2 libxrender1 libzstd1 zlib1g \
    fonts-dejavu-core

rm -rf "$target/package" "$target/bin"
libraries=$(cd "$work/package" && echo usr/lib/*-linux-gnu)
[ -d "$work/package/$libraries" ] || fail "the packages hold no library where it was expected"
for early in "$work"/package/lib/*-linux-gnu; do # some packages of Debian 12 put theirs there
    [ -d "$early" ] && cp -a "$early"/. "$work/package/$libraries/"
done
program=usr/lib/chromium/chromium-headless-shell
[ -x "$work/package/$program" ] || fail "the packages hold no headless shell where it was expected"
mv "$work/package" "$target/package"
cat >"$target/package/fonts.conf" <<END
<?xml version="1.0"?>
<!DOCTYPE fontconfig SYSTEM "urn:fontconfig:fonts.dtd">
<fontconfig><dir prefix="relative">usr/share/fonts</dir><cachedir prefix="xdg">fontconfig</cachedir></fontconfig>
END
# Not through the loader: Chromium starts its own program again, by /proc/self/exe.
mkdir "$target/bin"
cat >"$target/bin/chromium" <<END
#!/bin/sh
package=\$(cd "\${0%/*}/../package" && pwd)
export FONTCONFIG_FILE="\$package/fonts.conf"
export LD_LIBRARY_PATH="\$package/$libraries:\$package/$libraries/pulseaudio"
exec "\$package/$program" "\$@"
END
chmod +x "$target/bin/chromium"
"$target/bin/chromium" --version >/dev/null 2>&1 || fail "the program of the packages does not run on this machine: $("$target/bin/chromium" --version 2>&1 | tail -n 1)"
echo "$title is at .tools/chromium/bin/chromium ($("$target/bin/chromium" --version))"
