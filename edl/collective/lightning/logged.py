"""Values that `self.log` and torchmetrics have gathered in an epoch: Lightning's checkpoints leave them out."""

from __future__ import annotations

import sys
from typing import Any, Final

import torch
from torch import nn

from edl.errors import SettingsError

__all__ = ["LoggedValues"]


class LoggedValues:
    """Values that this rank has logged in the epoch so far: a local field of the `State`."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._saved: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        """Return values of `self.log` that the epoch's are computed from, and the states of torchmetrics' metrics."""
        trainer = self._trainer
        connector = trainer._logger_connector
        return {
            "first": connector._first_loop_iter,
            "hook": connector._current_fx,
            "results": {key: _pack_result(result) for key, result in trainer.fit_loop.epoch_loop._results.items()},
            "metrics": {name: _pack_metric(metric) for name, metric in self._metrics()},
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Keep them until a batch begins: what hooks log or reset before that has been logged before, too."""
        self._saved = saved

    def apply(self) -> None:
        """Put them back, once."""
        if self._saved is None:
            return
        saved, self._saved = self._saved, None
        trainer = self._trainer
        connector, results = trainer._logger_connector, trainer.fit_loop.epoch_loop._results
        connector._first_loop_iter = saved["first"]
        connector._current_fx = saved["hook"]
        metrics = dict(self._metrics())
        for name, packed in saved["metrics"].items():
            if name in metrics:
                _unpack_metric(metrics[name], packed)
        module = sys.modules[type(results).__module__]
        results.clear()
        for key, packed in saved["results"].items():
            results[key] = _unpack_result(module, trainer, packed, metrics)

    def _metrics(self) -> list[tuple[str, Any]]:
        module: nn.Module = self._trainer.lightning_module
        return [
            (name, child)
            for name, child in module.named_modules()
            if hasattr(child, "_defaults") and hasattr(child, "compute")
        ]


_META: Final = ("fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "enable_graph", "add_dataloader_idx")


def _pack_result(result: Any) -> dict[str, Any]:
    """Return a value of `self.log` and how it is reduced, as plain values and tensors."""
    meta = result.meta
    if meta.sync.group is not None:
        raise SettingsError(f"self.log({meta.name!r}, sync_dist_group=...) cannot be restored: leave the group out")
    return {
        "meta": {name: getattr(meta, name) for name in _META},
        "dataloader_idx": meta.dataloader_idx,
        "attribute": meta.metric_attribute,
        "reduce": meta.reduce_fx.__name__,
        "sync": (meta.sync.should, meta.sync.rank_zero_only, meta.sync.op),
        "is_tensor": result.is_tensor,
        "has_reset": result.has_reset,
        "value": result.value if result.is_tensor else None,
        "rows": getattr(result, "cumulated_batch_size", None),
        "last": result._forward_cache,
        "updates": result._update_count,
    }


def _unpack_result(module: Any, trainer: Any, packed: dict[str, Any], metrics: dict[str, Any]) -> Any:
    meta = module._Metadata(
        **packed["meta"],
        reduce_fx=packed["reduce"],
        dataloader_idx=packed["dataloader_idx"],
        metric_attribute=packed["attribute"],
    )
    should, rank_zero_only, operation = packed["sync"]
    meta.sync = module._Sync(
        _should=should, fn=trainer.strategy.reduce, _op=operation, _group=None, rank_zero_only=rank_zero_only
    )
    result = module._ResultMetric(meta, packed["is_tensor"])
    result.value = packed["value"] if packed["is_tensor"] else metrics.get(packed["attribute"])
    if packed["rows"] is not None:
        result.cumulated_batch_size = packed["rows"]
    result.has_reset = packed["has_reset"]
    result._forward_cache = packed["last"]
    result._update_count = packed["updates"]
    return result.to(trainer.strategy.root_device)


def _pack_metric(metric: Any) -> dict[str, Any]:
    """Return the state of a torchmetrics metric, most of which are not in `state_dict`."""
    return {"state": {name: getattr(metric, name) for name in metric._defaults}, "updates": metric._update_count}


def _unpack_metric(metric: Any, packed: dict[str, Any]) -> None:
    for name, value in packed["state"].items():
        setattr(
            metric, name, [_moved(item, metric) for item in value] if isinstance(value, list) else _moved(value, metric)
        )
    metric._update_count = packed["updates"]
    metric._computed = None


def _moved(tensor: torch.Tensor, metric: Any) -> torch.Tensor:
    return tensor.to(metric.device)
