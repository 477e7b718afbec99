#!/usr/bin/env bash
# Puts the real Slurm into .tools/slurm/bin (srun, sbatch, slurmctld, slurmd, munged ...): that of Debian 12 (bookworm),
# unpacked from its packages. Tests start its daemons with a configuration of their own, as whoever runs the tests.
#
#   tools/slurm.sh                          fetch, or do nothing if it is there
#   DEBIAN_MIRROR=URL tools/slurm.sh        where apt has no Debian mirror of its own (another distribution)
set -euo pipefail

name=slurm title=Slurm
without='tests that need Slurm will be skipped; they need its programs and munged, by slurmctld, slurmd, slurm-client and munge of Debian 12'
# shellcheck source=tools/debian.sh
. "$(dirname "${BASH_SOURCE[0]}")/debian.sh"

if [ -x "$target/bin/slurmd" ] && version=$("$target/bin/slurmd" -V 2>/dev/null); then
    echo "$title is there: .tools/slurm/bin ($version)"
    exit 0
fi

for loader in /lib64/ld-linux-x86-64.so.2 /lib/ld-linux-aarch64.so.1 ''; do
    [ -x "$loader" ] && break
done
[ -n "$loader" ] || fail "found no ld-linux for this machine's programs"
# The second line: libraries that the programs load and a bare system lacks.
fetch_packages bookworm slurmctld slurmd slurm-client slurm-wlm-basic-plugins munge libmunge2 \
    libdbus-1-3 libgcrypt20 libhwloc15 libjson-c5 liblz4-1 libnuma1 libpam0g libreadline8 libsystemd0 libudev1 libyaml-0-2

rm -rf "$target/package" "$target/bin"
libraries=$(cd "$work/package" && echo usr/lib/*-linux-gnu/slurm-wlm)
[ -d "$work/package/${libraries%/slurm-wlm}" ] || fail "the packages hold no library where it was expected"
for early in "$work"/package/lib/*-linux-gnu; do # some packages of Debian 12 put theirs there
    [ -d "$early" ] && cp -a "$early"/. "$work/package/${libraries%/slurm-wlm}/"
done
mv "$work/package" "$target/package"
ln -s "$libraries" "$target/package/plugins"
# Through the loader, and not with LD_LIBRARY_PATH: srun hands its environment on to what it starts.
mkdir "$target/bin"
for program in "$target"/package/usr/bin/* "$target"/package/usr/sbin/*; do
    wrapper=$target/bin/$(basename "$program" -wlm)
    cat >"$wrapper" <<END
#!/bin/sh
package=\${0%/*}/../package
exec $loader --library-path "\$package/${libraries%/slurm-wlm}:\$package/$libraries" "\$package/${program#"$target/package/"}" "\$@"
END
    chmod +x "$wrapper"
done
"$target/bin/slurmd" -V >/dev/null 2>&1 && "$target/bin/munged" --version >/dev/null 2>&1 ||
    fail "the programs of the packages do not run on this machine"
echo "$title is at .tools/slurm/bin ($("$target/bin/slurmd" -V))"
