"""Renders the Helm chart into serving/kube/manifests, for `kubectl apply`: `make manifests`.

Helm is .tools/helm/helm3 (tools/kubernetes.sh fetches it) or the one on PATH.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CHART = ROOT / "serving/kube/chart"
MANIFESTS = ROOT / "serving/kube/manifests"
GRAFANA = ROOT / "edl/dashboard/grafana.json"
IMAGE = "registry.example.com/edl/operator"
HEADER = "# Made from the chart by `make manifests`; for a cluster without Helm. {what}\n"
OPTIONS = ("crds.keep=false",)
ENABLED = {"capacity.yaml": "capacity.enabled=true", "dashboard.yaml": "dashboard.enabled=true"}
"""Files that may be left out, and so no other has any of their rights."""
FILES = {
    "crds.yaml": ("ElasticJob and TeacherPool.", ("crds", "users")),
    "operator.yaml": (
        f"The namespace edl, the store and the operator; put your image in the place of {IMAGE}.",
        ("rbac", "priority", "store", "operator"),
    ),
    "capacity.yaml": ("Lets the operator see nodes and all pods, read-only; may be left out.", ("capacity",)),
    "dashboard.yaml": (f"The page; put your image in the place of {IMAGE}.", ("dashboard",)),
}
NAMESPACE = "---\napiVersion: v1\nkind: Namespace\nmetadata:\n  name: edl\n"


def render(helm: str) -> dict[str, str]:
    """What each manifest should be."""
    rendered = {}
    for name, (what, templates) in FILES.items():
        command = [helm, "template", "edl", str(CHART), "--namespace", "edl"]
        options = (f"image.repository={IMAGE}", *OPTIONS, *([ENABLED[name]] if name in ENABLED else []))
        command += ["--set", ",".join(options)]
        for template in templates:
            command += ["--show-only", f"templates/{template}.yaml"]
        text = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=60).stdout
        text = re.sub(
            r"^# Source: .*\n| *helm\.sh/chart: .*\n| *app\.kubernetes\.io/managed-by: Helm\n", "", text, flags=re.M
        )
        text = re.sub(r"\n\n+", "\n", text)
        rendered[name] = HEADER.format(what=what) + (NAMESPACE if name == "operator.yaml" else "") + text
    return rendered


def main() -> None:
    """Copy Grafana's dashboard into the chart, and write the manifests."""
    fetched = ROOT / ".tools/helm/helm3"
    helm = str(fetched) if fetched.exists() else shutil.which("helm")
    if helm is None:
        sys.exit("tools/manifests.py: helm is neither in .tools/helm nor on PATH: tools/kubernetes.sh fetches it")
    (CHART / "files/grafana.json").write_text(GRAFANA.read_text())
    MANIFESTS.mkdir(exist_ok=True)
    for name, text in render(helm).items():
        (MANIFESTS / name).write_text(text)


if __name__ == "__main__":
    main()
