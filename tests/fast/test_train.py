"""What `edl train` refuses, and how it reads a table; no worker is started."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")

import pyarrow  # noqa: E402
import torch.distributed as dist  # noqa: E402

from edl.cli import main as edl_main  # noqa: E402
from edl.errors import NoTeacherError, SettingsError  # noqa: E402
from edl.train import ParquetTable, TrainPlan, _hard_loss, _Training, load_definition, main  # noqa: E402

LOSS = "def loss(outputs, labels):\n    return "
MODEL = "import torch\ndef model():\n    return torch.nn.Linear(2, 3)\n"


@pytest.fixture
def table(tmp_path: Path) -> str:
    columns: dict[str, Any] = {
        "x": [[0.5, 1.0], [1.5, 2.0], [2.5, 3.0]],
        "image": [[[1, 2], [3, 4]]] * 3,
        "words": ["one", "two", "three"],
        "ids": [[1], [1, 2], []],
        "digit": [0, 1, 2],
    }
    parquet.write_table(pyarrow.table(columns), tmp_path / "train.parquet", row_group_size=2)
    return str(tmp_path / "train.parquet")


def test_table_columns(table: str) -> None:
    """Nested lists of one shape become tensors, across row groups; ragged lists and text stay lists."""
    rows = ParquetTable(table).__getitems__([2, 0])
    assert rows["x"].dtype == torch.float32
    assert rows["x"].tolist() == [[2.5, 3.0], [0.5, 1.0]]
    assert rows["image"].shape == (2, 2, 2)
    assert rows["digit"].tolist() == [2, 0]
    assert rows["words"] == ["three", "one"]
    assert rows["ids"] == [[], [1]]


def test_transform_makes_columns(table: str) -> None:
    rows = ParquetTable(table, lambda columns: {"sum": columns["x"].sum(1)}).__getitems__([0])
    assert rows["sum"].tolist() == [1.5]


@pytest.mark.parametrize(
    ("source", "plan", "message"),
    [
        ("def modle(): pass", {}, "has no function model(), which returns the network to train; did you mean 'modle'?"),
        ("model = 3", {}, "model must be a function, not 3"),
        (MODEL, {}, "has no column 'label': name the one to learn (--label)"),
        (MODEL, {"label": "digits", "inputs": ["x"]}, "there is no column 'digits'; did you mean 'digit'?"),
        (MODEL, {"label": "digit"}, "column 'words' has values such as 'one', which are not numbers"),
        (MODEL, {"label": "digit", "inputs": ["y"]}, "there is no column 'y'"),
        (MODEL, {"teachers": "digits", "inputs": ["x"], "eval": "train.parquet"}, "no label to compare with"),
        (MODEL + "def transform(columns): return 1", {}, "transform(columns) must return a dict of columns"),
    ],
)
def test_refused(
    source: str, plan: dict, message: str, table: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(Path(table).parent)
    monkeypatch.setattr("sys.path", [])  # what is added is taken away again
    Path("definition.py").write_text(source)
    assert main(["definition.py", json.dumps({"data": table, **plan})]) == 2
    assert message in capsys.readouterr().err


def test_missing_teacher_is_raised(table: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent recognizes it by the traceback, and lets the job start again."""

    def run(training: _Training) -> None:
        raise NoTeacherError("no live teacher for 'digits'")

    monkeypatch.setattr(_Training, "run", run)
    tmp = Path(table).parent / "student.py"
    tmp.write_text(MODEL)
    with pytest.raises(NoTeacherError):
        main([str(tmp), json.dumps({"data": table, "inputs": ["x"], "label": "digit"})])


def test_empty_values_refused(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    parquet.write_table(pyarrow.table({"x": [1.0, None], "label": [0, 1]}), tmp_path / "t.parquet")
    tmp_path.joinpath("empty_values.py").write_text(MODEL)
    assert main([f"{tmp_path}/empty_values.py", json.dumps({"data": f"{tmp_path}/t.parquet"})]) == 2
    assert "column 'x' has 1 empty values: fill them" in capsys.readouterr().err


def test_not_a_parquet_file(tmp_path: Path) -> None:
    tmp_path.joinpath("rows.parquet").write_text("x,label")
    with pytest.raises(SettingsError, match="is not a Parquet file"):
        ParquetTable(f"{tmp_path}/rows.parquet")


@pytest.fixture
def train(table: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Trains in this process, as a job's only worker. Returns the output folder's files."""
    folder = Path(table).parent
    monkeypatch.setattr("sys.path", sys.path[:])
    alone = {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    monkeypatch.setattr(dist, "init_process_group", partial(dist.init_process_group, **alone))

    def run(source: str, name: str = "table", **plan: Any) -> set[str]:
        (folder / f"{name}.py").write_text(source)
        usual = {"data": table, "label": "digit", "inputs": ("x",), "output": f"{folder}/trained", "epochs": 1}
        _Training(load_definition(f"{folder}/{name}.py"), TrainPlan(**(usual | plan))).run()
        return {path.name for path in (folder / "trained").iterdir()}

    yield run
    if dist.is_initialized():
        dist.destroy_process_group()


def test_results_of_one_training(train: Any) -> None:
    """What an earlier training wrote and this one did not does not stay; a pretrained model trains as any other."""
    assert "model.pt2" in train(MODEL, "first")
    untraceable = """
import torch
class Model(torch.nn.Linear):
    def forward(self, x):
        assert not torch.is_grad_enabled() or self.training
        assert not torch.compiler.is_exporting()
        return super().forward(x)
def model():
    return Model(2, 3).eval()
"""
    assert train(untraceable, "second") == {"metrics.json", "model.safetensors"}


def test_output_is_tried_first(train: Any, tmp_path: Path) -> None:
    tmp_path.joinpath("file").touch()
    with pytest.raises(SettingsError, match="cannot be written"):
        train("def model():\n    raise AssertionError('too late')", "never", output=f"{tmp_path}/file")


PAIR = """
import torch
class Pair(torch.nn.Linear):
    def forward(self, x):
        outputs = super().forward(x)
        return outputs, outputs
def model():
    return Pair(2, 3)
"""


def test_outputs_of_any_kind(train: Any, capsys: pytest.CaptureFixture, table: str) -> None:
    """The user's loss is also that of the evaluation where the default would not fit."""
    train(PAIR + LOSS + "outputs[0].mean() * 0 + 2", "pair", eval=table)
    (line,) = (line for line in capsys.readouterr().out.splitlines() if "epoch 0" in line)
    assert "training loss 2, loss 2, " in line


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (PAIR, "returns a tuple, but the default loss needs a tensor"),
        (MODEL + LOSS + "outputs.mean() * float('nan')", "epoch 0: the training loss is nan"),
        (MODEL + LOSS + "outputs.sum(1)", r"the loss has the shape \[3\]: .*losses\.mean\(\)"),
        (MODEL + LOSS + "1.5", "the loss is 1.5: it must be a tensor"),
        (MODEL + "def optimizer(parameters):\n    return torch.optim.LBFGS(parameters)", "LBFGS needs a closure"),
        (MODEL.replace("Linear(2, 3)", "LazyLinear(3)"), "weight of the model has no shape yet: run a batch through"),
        (MODEL.replace("Linear(2, 3)", "Identity()"), "no parameter to train"),
        (
            MODEL + LOSS + "1 / 0\ndef metrics(outputs, labels):\n    return 0.5",
            "must return a dict of numbers, not 0.5",
        ),
    ],
)
def test_unsound_definition_ends_training(train: Any, source: str, message: str, table: str) -> None:
    with pytest.raises(SettingsError, match=message):
        train(source, "unsound", eval=table if "metrics" in source else None)


@pytest.mark.parametrize(
    ("shape", "labels", "message"),
    [
        ((4, 3), torch.zeros(4, 2).long(), "the logits of the classes"),
        ((4, 3), torch.zeros(4), "as many numbers"),
        ((4, 3), torch.tensor([0, 1, 2, 3]), "3"),
    ],
)
def test_outputs_that_do_not_fit(shape: tuple[int, ...], labels: Any, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        _hard_loss(torch.zeros(shape), labels)


def test_default_losses() -> None:
    assert _hard_loss(torch.zeros(4, 1), torch.ones(4)) == 1
    assert np.isclose(_hard_loss(torch.zeros(2, 4), torch.tensor([1, 3])), np.log(4))
    assert np.isclose(_hard_loss(torch.zeros(2, 4), torch.tensor([1, -100])), np.log(4) / 2)
    assert _hard_loss(torch.zeros(2, 4), torch.tensor([-100, -100])) == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--workers", "4:1"], "--workers '4:1'"),
        (["--workers", "many"], "expected a number, or MIN:MAX"),
        (["--alpha", "2"], "--alpha 2.0"),
        (["--epoch", "3"], "unknown option '--epoch'; did you mean '--epochs'"),
    ],
)
def test_wrong_options(options: list[str], message: str, table: str, capsys: pytest.CaptureFixture) -> None:
    assert edl_main(["train", __file__, "--data", table, *options]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "shape"),
    [
        (["--workers", "4", "--job", "mine"], ["--nproc-per-node", "4", "--rdzv-id", "mine"]),
        (["--workers", "1:4", "--job", "mine"], ["--nnodes", "1:4", "--rdzv-id", "mine"]),
    ],
)
def test_named_job_starts_its_workers(
    options: list[str], shape: list[str], table: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[str] = []
    monkeypatch.setattr("edl.collective.agent.command_line.cli.main", lambda argv: given.extend(argv) or 0)
    assert edl_main(["train", __file__, "--data", table, *options]) == 0
    assert given[:4] == shape


def test_image_submits_a_job(table: str, capsys: pytest.CaptureFixture) -> None:
    """The file is sent along, and is the argument of the module that `edl run` starts in each pod."""
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    definition = Path(table).with_name("model.py")
    definition.write_text(MODEL)
    options = ["--image", "student:1", "--workers", "1:4", "--run", "--dry-run --gpus 1", "--epochs", "3"]
    assert edl_main(["train", str(definition), "--data", "s3://bucket/train.parquet", *options]) == 0
    script, job = yaml.safe_load_all(capsys.readouterr().out)
    assert script["data"]["model.py"] == MODEL
    *start, plan = job["spec"]["run"]
    assert start == ["--nproc-per-node", "1", "--module", "edl.train", "/edl/script/model.py"]
    assert json.loads(plan)["epochs"] == 3
    assert (job["spec"]["minReplicas"], job["spec"]["maxReplicas"]) == (1, 4)
