"""The public names, exactly: adding or removing one is a decision, and shows here."""

from __future__ import annotations

import importlib
import os
import pkgutil
from types import ModuleType

import pytest

import edl

PUBLIC = {
    "edl": ["__version__"],
    "edl.cli": ["main"],
    "edl.collective": [
        *("Checkpointer", "ElasticSampler", "ElasticTrainer", "Evaluator", "State"),
    ],
    "edl.collective.paddle": ["Checkpointer", "PaddleState", "init_parallel_env"],
    "edl.collective.training": ["AdaScale", "AutoBatch", "Linear", "SampleSchedule", "SquareRoot"],
    "edl.dashboard": [],
    "edl.dashboard.server": ["DashboardServer", "DashboardSettings"],
    "edl.dashboard.state": ["DashboardState", "StateReader", "as_json"],
    "edl.datasets": [
        *("Dataset", "FollowSettings", "Follower", "LabelDataset", "LeasedUnits", "ShardSettings", "Source", "UnitId"),
        *("load_dataset", "open_data", "open_dataset", "same_data"),
    ],
    "edl.discovery": ["Instance", "Registry", "Snapshot", "Store", "open_registry", "open_store"],
    "edl.distill": [
        *("Credentials", "DistillReader", "Options", "Policy", "ReaderStats", "Scorer", "Teachers", "TopK"),
        *("on_policy",),
    ],
    "edl.distill.compress": ["TopK", "to_float16", "top_k"],
    "edl.distill.scoring": ["Scorer", "on_policy"],
    "edl.distill.cache": [
        "CacheKey",
        "CacheStats",
        "CacheView",
        "Found",
        "LabelSet",
        "RowIds",
        "SequenceIds",
        "SoftLabelCache",
        "fingerprints_of",
        "load_labels",
    ],
    "edl.distill.losses": [
        *("DistillLoss", "KLEstimator", "Reduction", "TeacherIs", "TokenCount", "chunked_token_loss"),
        *("feature_cosine", "feature_mse"),
        *("kl_divergence", "logit_mse", "sampled_kl", "soft_cross_entropy", "target_labels"),
        *("token_log_probabilities", "token_loss", "top_k_kl"),
    ],
    "edl.distill.metrics": ["export"],
    "edl.distill.keras": ["DistillationAccuracy", "DistillationLoss", "SoftLabelDataset"],
    "edl.distill.paddle": ["PaddleLoader", "distill"],
    "edl.distill.paddle_losses": [
        *("DistillLoss", "kl_divergence", "logit_mse", "soft_cross_entropy", "token_loss", "top_k_kl"),
    ],
    "edl.distill.torch": ["TorchLoader", "distill"],
    "edl.http_server": [],
    "edl.distill.transformers": ["DistillArguments", "DistillTrainer"],
    "edl.distill.views": ["AugmentedViews", "view_id", "view_seed"],
    "edl.kube": [],
    "edl.load_reporting": [
        *("LoadPublisher", "LoadSource", "ServiceLoad", "StudentRate", "TeacherRate"),
        *("read_all_wanted", "read_service", "read_services", "read_wanted"),
    ],
    "edl.master": [
        *("MasterClient", "MasterServer", "MasterSettings", "Shard", "ShardReader", "ShardSettings"),
        *("ShardingClient", "open_dataset"),
    ],
    "edl.master.client.torch": ["ShardDataset"],
    "edl.protocol": ["codec", "kserve", "names", "tensors"],
    "edl.proxy": [],
    "edl.testing": ["LocalTeacher"],
    "edl_serving": ["Array", "Backend", "ServerSettings", "TeacherServer", "TensorSpec", "TopKArrays", "serve"],
}


def load(module: str) -> ModuleType:
    if "paddle" in module:
        pytest.importorskip("paddle", reason="PaddlePaddle is not installed")
    if module.endswith(".keras"):
        os.environ.setdefault("KERAS_BACKEND", "torch")
        pytest.importorskip("keras", reason="Keras is not installed")
    if module.startswith("edl.collective") or module in (
        *("edl.distill.losses", "edl.distill.torch", "edl.distill.views", "edl.master.client.torch"),
    ):
        pytest.importorskip("torch", reason="PyTorch is not installed")
    if module == "edl.distill.transformers":
        pytest.importorskip("transformers", "5.23", reason="transformers is not installed, or too old")
    return importlib.import_module(module)


@pytest.mark.parametrize("module", sorted(PUBLIC))
def test_public_module_offers_these_names(module: str) -> None:
    found = load(module)
    assert sorted(found.__all__) == sorted(PUBLIC[module])
    for name in PUBLIC[module]:
        assert hasattr(found, name), f"{module}.__all__ names {name}, which is not there"


def test_every_subpackage_is_pinned_here() -> None:
    packages = {f"edl.{info.name}" for info in pkgutil.iter_modules(edl.__path__) if info.ispkg}
    assert packages <= PUBLIC.keys()


@pytest.mark.parametrize("module", sorted(PUBLIC))
def test_public_names_are_explained(module: str) -> None:
    """A public module and what it offers are explained."""
    found = load(module)
    assert found.__doc__
    for name in PUBLIC[module]:
        value = getattr(found, name)
        if callable(value) and getattr(value, "__module__", "").startswith("edl"):
            assert value.__doc__, f"{module}.{name} has no docstring"
