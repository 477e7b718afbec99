"""`edl train`: train a model from a model definition and a Parquet file, in one command.

The command checks its options, and starts the training loop `edl.train` with `edl run` on this machine or, with
`--image`, with `edl submit` on Kubernetes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from edl.cli.kube.manifests import ReplicaRange, replica_range, split_words
from edl.command_line import CommandParser, at_least, split_names
from edl.errors import SettingsError

_DESCRIPTION = """\
Trains the network from model() in MODEL.py on the rows of a Parquet file. Training is elastic, and uses soft
labels if you name teachers. With --eval, each epoch ends with an evaluation. The model is written to --output."""

_EXAMPLES = """\
model.py (only model() is required):
  def model():                     a torch.nn.Module (or a Keras model); it gets each --inputs column as an argument
  def loss(outputs, labels):       mean over the rows (default: cross-entropy; squared error if labels are floats).
                                   With a third parameter, soft, it gets the teachers' outputs and returns the
                                   whole loss
  def optimizer(parameters):       default: torch.optim.Adam(parameters)
  def transform(columns):          changes a batch, a dict from column to tensor: shapes, scales, tokens, new columns
  def metrics(outputs, labels):    a dict of means over the rows of --eval (default: loss and accuracy)

examples:
  edl train model.py --data train.parquet --eval test.parquet
      one worker on this machine
  edl train model.py --data train.parquet --teachers digits --workers 4
      four workers here, which also learn from the teachers that `edl serve --service digits` registers
  edl train model.py --data 's3://bucket/train/*.parquet' --workers 1:4 --store consul://10.0.0.9:8500
      one worker; start the same command again, here or elsewhere, to add a worker. Any worker may be killed
  edl train model.py --data s3://bucket/train.parquet --output s3://bucket/trained --workers 1:4 --image student:1
      on Kubernetes"""

_DETAILS = """\
Each worker holds the whole table in memory. Numbers and lists of equal length become tensors; text, bytes and other
lists are passed to transform() as lists. --output gets model.safetensors (the weights), model.pt2 (for
`edl serve --torch-export`, if torch.export can trace the model) and metrics.json (by step)."""

_LAUNCH = ("help_all", "model", "workers", "image", "job", "run", "checkpoint")
"""Options that are not fields of `edl.train.TrainPlan`, which is not imported here because it imports torch."""


def main(argv: Sequence[str]) -> int:
    """Run `edl train`."""
    options = parser().parse_args(argv)
    workers, extra = options.workers, options.run
    if not Path(options.model).is_file():
        raise SettingsError(f"{options.model}: there is no such file in {Path.cwd()}")
    if not 0 <= options.alpha <= 1 or options.temperature <= 0:
        given = f"--alpha {options.alpha}, --temperature {options.temperature}"
        raise SettingsError(f"{given}: expected an alpha from 0 to 1, and a temperature above 0")
    plan = json.dumps({name: value for name, value in vars(options).items() if name not in _LAUNCH})
    stored = ["--checkpoint", options.checkpoint] if options.checkpoint else []
    store = ["--store", options.store] if options.store else []
    if options.image:
        from edl.cli.kube.submit import main as submit

        # `edl submit` sends the file as the job's script; in the pod it is an argument of the module.
        name = ["--name", options.job] if options.job else []
        command = ["--image", options.image, "--workers", str(workers), "--run", "--module edl.train"]
        return submit([*command, *name, *store, *stored, *extra, options.model, plan])
    from edl.collective.agent.command_line.cli import main as run

    if workers.most == workers.least:
        shape = ["--nproc-per-node", str(workers.most), *(["--rdzv-id", options.job] if options.job else [])]
    else:
        source = Path(options.model).read_bytes()
        digest = hashlib.sha256(source + plan.encode()).hexdigest()[:8]
        shape = ["--nnodes", str(workers), "--rdzv-id", options.job or f"{Path(options.model).stem}-{digest}"]
    return run([*shape, *store, *stored, *extra, "--module", "edl.train", options.model, plan])


def parser() -> CommandParser:
    """Return the parser of the command's arguments."""
    found = CommandParser("edl train", _DESCRIPTION, _EXAMPLES, _DETAILS)
    add = found.add_argument
    add("model", metavar="MODEL.py", help="file with model()")
    add("--data", required=True, metavar="PARQUET", help="file, folder, pattern or URL with the rows to train on")
    add("--eval", metavar="PARQUET", help="rows for the evaluation after each epoch")
    add("--label", metavar="COLUMN", help="column to learn (default: label; none if there are only teachers)")
    add(
        "--inputs",
        type=split_names,
        default=[],
        metavar="COLUMN,…",
        help="arguments of the model (default: all other columns)",
    )
    add("--epochs", type=at_least(1), default=10, metavar="N", help="number of epochs (default: 10)")
    add(
        "--batch",
        type=at_least(1),
        default=64,
        metavar="ROWS",
        help="rows per update, across all workers (default: 64)",
    )
    add("--output", default="trained", metavar="FOLDER", help="folder or URL for the model (default: trained)")
    add = found.add_argument_group("teachers").add_argument
    add("--teachers", metavar="NAME", help="service of the teachers, or HOST:PORT,…")
    add("--alpha", type=float, default=0.9, metavar="A", help="share of the soft loss, from 0 to 1 (default: 0.9)")
    add("--temperature", type=float, default=4.0, metavar="T", help="temperature of the soft loss (default: 4)")
    add = found.add_argument_group("workers").add_argument
    many = "N: processes here. MIN:MAX: this command is one worker; more can join (default: 1)"
    add("--workers", type=replica_range(1), default=ReplicaRange(1, 1), metavar="N", help=many)
    image = "run on Kubernetes with this image, which must contain EDL (edl submit)"
    add("--image", default="", metavar="IMAGE", help=image)
    found.add_store_option("where workers and teachers meet")
    add = found.add_advanced_group("more").add_argument
    names = "inputs of the teachers, and their columns (default: --inputs)"
    add("--teacher-inputs", type=split_names, default=[], metavar="NAME[=COLUMN],…", help=names)
    add("--teacher-output", default="logits", metavar="NAME", help="output of the teachers (default: logits)")
    add("--micro-batch", type=at_least(1), metavar="ROWS", help="maximum rows that fit in a worker's memory at once")
    add("--seed", type=at_least(0), default=0, metavar="N", help="seed for weights and order (default: 0)")
    add("--checkpoint", default="", metavar="URL", help="where to store the state, in case all workers are lost")
    add("--job", default="", metavar="NAME", help="name of the job (default: derived from the file and options)")
    more = "more options for `edl run`, or for `edl submit` with --image"
    add("--run", type=split_words, default=(), metavar="OPTIONS", help=more)
    return found
