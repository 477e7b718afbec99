#!/usr/bin/env bash
# Gives each node of ../shared/kube's cluster a folder of its own for its pods' logs, and a kubelet that does not wait.
#
#   tools/kubelet.sh DIR     DIR/bin/kubelet becomes a program that starts the kubelet of the node that it is for
#
# All nodes of that cluster are on one machine, Kubernetes 1.20 has the folder fixed in the program (/var/log/pods), and
# about once a minute a kubelet removes from it what belongs to pods that it does not know: `kubectl logs` of the other
# nodes' pods fails from then on. So the program is copied for each node, with another folder of the same length in it:
# /var/log/pod1 for node1. Nodes beyond node9 keep the program as it is.
#
# By its own default a kubelet asks the API server 5 times a second, so that thirty pods that start or end at once take
# their turns for a minute. An API server on the same machine needs no such mercy.
set -euo pipefail

bin=${1:?usage: tools/kubelet.sh DIR}/bin
if [ ! -x "$bin/kubelet" ]; then
    echo "tools/kubelet.sh: $bin/kubelet is not there: ../shared/kube/kube build makes it" >&2
    exit 1
fi
cat >"$bin/kubelet.wrapper" <<'WRAPPER'
#!/usr/bin/env bash
# Written by tools/kubelet.sh of EDL: starts kubelet.bin with a folder for logs that is this node's own.
set -euo pipefail
program=$0.bin
for argument in "$@"; do
    case $argument in
    --hostname-override=node[1-9])
        number=${argument#--hostname-override=node}
        program=$0.node$number
        if [ ! -x "$program" ] || [ "$0.bin" -nt "$program" ]; then
            sed "s#/var/log/pods#/var/log/pod$number#g" "$0.bin" >"$program.new"
            chmod +x "$program.new"
            mv "$program.new" "$program"
        fi
        ;;
    esac
done
exec "$program" "$@" --kube-api-qps=100 --kube-api-burst=200
WRAPPER
chmod +x "$bin/kubelet.wrapper"
if [ "$(head -c 2 "$bin/kubelet")" != '#!' ]; then
    mv "$bin/kubelet" "$bin/kubelet.bin" # the program itself: not done before
fi
mv "$bin/kubelet.wrapper" "$bin/kubelet"
