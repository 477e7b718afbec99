"""Distillation with Hugging Face's `Trainer`: `DistillTrainer`, which trains on teachers' labels."""

from edl.distill.transformers.student_loss import DistillArguments
from edl.distill.transformers.trainer import DistillTrainer

__all__ = ["DistillArguments", "DistillTrainer"]
