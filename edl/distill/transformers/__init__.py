"""Distillation with Hugging Face's `Trainer`: `DistillTrainer`, which trains on teachers' labels.

What belongs here: where the `Trainer` reads its batches, and how its loss is made of labels. What labels are, and how
they are asked for, is the rest of `edl.distill`; the losses are in `edl.distill.losses`.
"""

from edl.distill.transformers.student_loss import DistillArguments
from edl.distill.transformers.trainer import DistillTrainer

__all__ = ["DistillArguments", "DistillTrainer"]
