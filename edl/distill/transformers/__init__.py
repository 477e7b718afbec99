"""Distillation with Hugging Face's `Trainer`: `DistillTrainer`, which trains on teachers' labels.

This package hooks into the `Trainer` where it reads batches and computes its loss. Labels and requests are handled by
the rest of `edl.distill`; the losses are in `edl.distill.losses`.
"""

from edl.distill.transformers.student_loss import DistillArguments
from edl.distill.transformers.trainer import DistillTrainer

__all__ = ["DistillArguments", "DistillTrainer"]
