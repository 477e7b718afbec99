"""An operator of a namespace behind a proxy, and jobs whose workers do nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks._api_proxy import ApiProxy
from tests.cluster.api import Cluster
from tests.cluster.operator_process import ACCOUNT, install_account


@pytest.fixture
def proxy(cluster: Cluster, namespace: str, tmp_path: Path) -> Iterator[ApiProxy]:
    """Between an operator with the chart's rights and the API server: `operator("--kubeconfig", proxy.kubeconfig)`."""
    install_account(cluster, namespace, capacity=False)
    account = tmp_path / "account.json"
    cluster.write_account_kubeconfig(namespace, ACCOUNT, account)
    found = ApiProxy(account, tmp_path)
    yield found
    found.close()


@pytest.fixture
def make_job(
    namespace: str, pod_template: Callable[..., dict[str, Any]], tmp_path: Path
) -> Callable[..., dict[str, Any]]:
    """An ElasticJob whose workers sleep."""

    def make(name: str, **spec: Any) -> dict[str, Any]:
        template = pod_template(["python", "-c", "import time; time.sleep(1e5)"])
        return {
            "apiVersion": "edl.io/v1alpha1",
            "kind": "ElasticJob",
            "metadata": {"name": name, "namespace": namespace},
            "spec": {
                "run": ["train.py"],
                "scaling": "external",
                "store": f"sqlite://{tmp_path}/store.sqlite",
                "gracePeriodSeconds": 1,
                "template": template,
                **spec,
            },
        }

    return make
