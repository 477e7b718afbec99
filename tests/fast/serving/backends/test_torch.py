"""Models in PyTorch and functions over numpy arrays: arguments, outputs, precision, and files not to be trusted."""

from __future__ import annotations

import ctypes
import pickle
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from edl.distill import DistillReader
from edl.errors import SettingsError
from edl_serving import Array
from edl_serving.backends import ModelSource, open_backends
from edl_serving.backends.backend import TensorSpec
from edl_serving.backends.callable import CallableBackend
from edl_serving.backends.torch import TorchBackend
from tests.fast.serving.backends.conftest import Saved
from tests.fast.serving.backends.models import HERE, expected, factory, trained
from tests.fast.serving.conftest import StartInside

X = np.random.default_rng(0).normal(size=(5, 4)).astype(np.float32)


def backend(model: Any, *inputs: str, **options: Any) -> TorchBackend:
    return TorchBackend(model, inputs or ("x:float32[4]",), device="cpu", **options)


def test_inputs_go_by_name_or_position() -> None:
    class Two(nn.Module):
        def forward(self, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
            return first - second

    inputs = {"first": X, "second": 2 * X}
    by_name = backend(Two(), "second:float32[4]", "first:float32[4]")
    np.testing.assert_allclose(by_name.predict(inputs)["output"], -X)
    by_position = backend(Two(), "a:float32[4]", "b:float32[4]")
    np.testing.assert_allclose(by_position.predict({"a": X, "b": 2 * X})["output"], -X)


def bert(input_ids: Any = None, attention_mask: Any = None, token_type_ids: Any = None) -> Any: ...
def two(x: Any, mask: Any) -> Any: ...
def optional(x: Any, image_size: Any = None) -> Any: ...
def only_positions(x: Any, y: Any, /) -> Any: ...
def only_keywords(*, ids: Any, mask: Any) -> Any: ...
def more(x: Any, *others: Any, **named: Any) -> Any: ...
def named(x: Any, **named: Any) -> Any: ...


@pytest.mark.parametrize(
    ("model", "names", "order"),
    [
        (bert, "attention_mask input_ids", None),
        (bert, "ids mask", "'ids' as 'input_ids', 'mask' as 'attention_mask'"),
        (bert, "input_ids attention_masks", "'input_ids' as 'input_ids', 'attention_masks' as 'attention_mask'"),
        (two, "image mask", "'image' as 'x', 'mask' as 'mask'"),
        (optional, "image", "'image' as 'x'"),
        (only_positions, "x y", "'x' as 'x', 'y' as 'y'"),
        (only_keywords, "mask ids", None),
        (more, "x mask", "'x' as 'x', 'mask' as 'others'"),
        (torch.relu, "image", "'image'"),
        (lambda *tensors: None, "a b", "'a' as 'tensors', 'b' as 'tensors'"),
    ],
)
def test_order_of_inputs_is_logged(model: Any, names: str, order: str | None, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        backend(model, *(f"{name}:float32[4]" for name in names.split()), outputs=["y:float32[4]"])
    assert caplog.messages == ([f"the model gets its inputs by position: {order}"] if order else [])


@pytest.mark.parametrize(
    ("model", "names", "words"),
    [
        (
            bert,
            "attention_masks input_ids",
            r"'attention_masks': .*did you mean 'attention_mask'\? .*become 'input_ids'",
        ),
        (bert, "attention_masks input_idz", r"'attention_masks': .*become 'input_ids': give each --input the name"),
        (
            bert,
            "input_ids segments",
            r"'segments': .* are input_ids, attention_mask, token_type_ids\. .*'attention_mask'",
        ),
        (two, "mask image", "'image': .* 'mask' would become 'x'"),
        (only_positions, "y x", "'y': .*the order is wrong"),
        (only_keywords, "ids masks", "'masks': .*did you mean 'mask'"),
        (named, "x mask", "'mask': .*'mask' would become an extra one"),
    ],
)
def test_names_that_contradict_the_order(model: Any, names: str, words: str) -> None:
    with pytest.raises(SettingsError, match=f"--input {words}"):
        backend(model, *(f"{name}:float32[4]" for name in names.split()))


def test_names_in_files_are_compared(tmp_path: Path) -> None:
    class Minus(nn.Module):
        def forward(self, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
            return first - second

    program = torch.export.export(Minus(), (torch.ones(3, 4),), {"second": torch.ones(3, 4)})
    torch.export.save(program, tmp_path / "m.pt2")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.jit.script(Minus()).save(str(tmp_path / "m.ts"))  # type: ignore[no-untyped-call]
    for kind, file in (("torch-export", "m.pt2"), ("torchscript", "m.ts")):

        def opened(*names: str, target: str = file, kind: str = kind) -> Any:
            inputs = tuple(f"{name}:float32[4]" for name in names)
            return open_backends(ModelSource(kind, str(tmp_path / target), inputs=inputs, device="cpu"))[0]

        x = np.ones((3, 4), np.float32)
        np.testing.assert_array_equal(opened("second", "first").predict({"first": 2 * x, "second": x})["output"], x)
        np.testing.assert_array_equal(opened("a", "b").predict({"a": 2 * x, "b": x})["output"], x)
        with pytest.raises(SettingsError, match=r"--input 'seconds': .*did you mean 'second'"):
            opened("seconds", "first")


def test_declared_shapes_are_compared() -> None:
    """At the warm-up, unless the size of the output may depend on that of the inputs."""
    backend(trained(), outputs=["y:float32[3]"]).warm_up(2)
    backend(trained(), outputs=["y:float32[-1]"]).warm_up(2)
    for rows, declared in ((1, "9"), (2, "9"), (2, "3,1"), (2, "")):
        with pytest.raises(SettingsError, match=r'output .y. is declared as .*\[3\] per row: .*"y:FP32\[3\]"'):
            backend(trained(), outputs=[f"y:float32[{declared}]"]).warm_up(rows)
    backend(lambda x: x * 2, "x:float32[-1]", outputs=["y:float32[128]"]).warm_up(2)


def test_tuples_and_mappings_are_outputs() -> None:
    class Tuple(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[Any, ...]:
            return x, None, x.sum(1)

    class Output(dict[str, Any]):
        """Like a model output of Hugging Face: a mapping, with more in it than asked for."""

    class Named(nn.Module):
        def forward(self, x: torch.Tensor) -> Mapping[str, Any]:
            return Output(hidden=x * 2, past=None, logits=x * 3)

    assert backend(Tuple()).outputs == (TensorSpec("output_0", "FP32", (4,)), TensorSpec("output_1", "FP32"))
    two = backend(Tuple(), outputs=["same", "sum"])
    np.testing.assert_allclose(two.predict({"x": X})["sum"], X.sum(1), rtol=1e-5)
    one = backend(Named(), outputs=["logits"])
    assert one.outputs == (TensorSpec("logits", "FP32", (4,)),)
    np.testing.assert_allclose(one.predict({"x": X})["logits"], 3 * X)
    with pytest.raises(SettingsError, match="--output: the model returns 'hidden', 'logits'; expected 'scores'"):
        backend(Named(), outputs=["scores"])
    with pytest.raises(TypeError, match="returned str, not a tensor"):
        backend(lambda x: "a string")


def test_warm_up_uses_a_sample() -> None:
    """A model that cannot compute zeros of any size is tried with a sample."""
    sizes: list[int] = []

    def model(x: torch.Tensor) -> torch.Tensor:
        assert x.shape[2:] == (6, 6)
        assert bool((x > 0).all())
        sizes.append(len(x))
        return x.mean((2, 3))

    with pytest.raises(AssertionError):
        backend(model, "x:float32[3,?,?]")
    sampled = backend(model, "x:float32[3,?,?]", sample={"x": np.ones((2, 3, 6, 6))})
    assert sampled.inputs == (TensorSpec("x", "FP32", (3, -1, -1)),)
    assert sampled.outputs == (TensorSpec("output", "FP32", (3,)),)
    sizes.clear()
    sampled.warm_up(7)
    assert sorted(sizes) == [1, 7]
    with pytest.raises(SettingsError, match="--sample has y, but no 'x'"):
        backend(model, "x:float32[3,?,?]", sample={"y": np.ones((2, 3, 6, 6))})


def test_uint8_images_are_normalized() -> None:
    image = np.random.default_rng(0).integers(0, 256, (4, 3, 8, 8), np.uint8)
    image.flags.writeable = False
    seen = backend(lambda image: image * 1, "image:uint8[3,8,8]", normalize="imagenet")
    assert seen.outputs == (TensorSpec("output", "FP32", (3, 8, 8)),)
    mean = np.array([0.485, 0.456, 0.406], np.float32).reshape(3, 1, 1)
    deviation = np.array([0.229, 0.224, 0.225], np.float32).reshape(3, 1, 1)
    np.testing.assert_allclose(seen.predict({"image": image})["output"], (image / 255 - mean) / deviation, atol=1e-5)
    grey = backend(lambda image: image * 1, "image:uint8[3,8,8]", normalize="0/1")
    np.testing.assert_allclose(grey.predict({"image": image})["output"], image / 255, atol=1e-6)


@pytest.mark.parametrize(
    ("normalize", "inputs", "words"),
    [
        ("0.5/0", "image:uint8[3,8,8]", "expected imagenet, or means/deviations"),
        ("0.5,nan,1/1,1,1", "image:uint8[3,8,8]", "expected imagenet, or means/deviations"),
        ("imagenet", "image:uint8[1,8,8]", r"3 channels, but input 'image' is \[1, 8, 8\]"),
        ("imagenet", "image:float32[3,8,8]", "no input is UINT8"),
    ],
)
def test_unfit_normalizations_are_named(normalize: str, inputs: str, words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        backend(lambda image: image * 1, inputs, normalize=normalize)


def test_mixed_precision_answers_float32() -> None:
    computed: list[torch.dtype] = []

    class Watched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = trained()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            answer: torch.Tensor = self.model(x)
            computed.append(answer.dtype)
            return answer

    mixed = backend(Watched(), autocast="bfloat16", outputs=["logits"])
    assert mixed.outputs == (TensorSpec("logits", "FP32", (3,)),)
    np.testing.assert_allclose(mixed.predict({"x": X})["logits"], expected(X), atol=0.1)
    assert set(computed) == {torch.bfloat16}
    with pytest.raises(SettingsError, match="--autocast 'int8': expected one of bfloat16, float16"):
        backend(trained(), autocast="int8")


def test_unusable_inputs_and_devices_are_named() -> None:
    with pytest.raises(SettingsError, match="'words': PyTorch has no tensors of BYTES"):
        backend(trained(), "words:BYTES")
    with pytest.raises(SettingsError, match="does not describe its inputs: give --input"):
        TorchBackend(trained(), ())
    count = torch.cuda.device_count()
    with pytest.raises(SettingsError, match=rf"--device 'cuda:{count}': PyTorch sees {count} GPUs"):
        TorchBackend(trained(), ["x:float32[4]"], device=f"cuda:{count}")


class Attack:
    def __init__(self, trace: Path) -> None:
        self._trace = trace

    def __reduce__(self) -> Any:
        return (Path.touch, (self._trace,))


def test_checkpoints_cannot_run_code(tmp_path: Path) -> None:
    attack, trace = tmp_path / "attack.pt", tmp_path / "trace"
    torch.save({"state_dict": Attack(trace)}, attack)
    with pytest.raises(SettingsError, match="cannot be read without running code from it"):
        open_backends(factory(attack))
    attack.write_bytes(pickle.dumps(Attack(trace), protocol=2))
    with pytest.raises(SettingsError, match="cannot be read without running code from it"):
        open_backends(factory(attack))
    assert not trace.exists()


@pytest.mark.parametrize(
    ("content", "name", "words"),
    [
        (nn.Linear(2, 2).state_dict(), "w.pt", "does not fit the model"),
        ([1, 2], "w.pt", "holds list, not a state_dict"),
        (b"garbage", "w.pt", "--checkpoint"),
        (b"garbage", "w.safetensors", "is not a safetensors file"),
    ],
)
def test_other_checkpoints_are_named(content: Any, name: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / name
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        torch.save(content, path)
    with pytest.raises(SettingsError, match=words):
        open_backends(factory(path))


@pytest.mark.parametrize("wrap", ["plain", "model", "distributed"])
def test_common_checkpoints_are_read(wrap: str, tmp_path: Path, saved: Saved) -> None:
    state = trained().state_dict()
    whole: Any = {"plain": state, "model": {"model": state, "optimizer": {"lr": 0.1}}}.get(wrap)
    torch.save(whole or {f"module.{name}": value for name, value in state.items()}, tmp_path / "w.pt")
    (opened,), (other,) = open_backends(factory(tmp_path / "w.pt")), open_backends(saved("safetensors"))
    np.testing.assert_allclose(opened.predict({"x": X})["logits"], expected(X), rtol=1e-5, atol=1e-6)
    assert opened.version == other.version, "that of the weights, whatever file they come in"


def test_exported_programs_named_outputs(tmp_path: Path) -> None:
    class Two(nn.Module):
        def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"logits": (ids * mask).float(), "total": (ids + mask).sum(1)}

    rows = torch.export.Dim("rows")
    ids, mask = torch.ones(3, 4, dtype=torch.int64), torch.ones(3, 4, dtype=torch.int64)
    program = torch.export.export(Two(), (ids,), {"mask": mask}, dynamic_shapes={"ids": {0: rows}, "mask": {0: rows}})
    torch.export.save(program, tmp_path / "m.pt2")
    (opened,) = open_backends(ModelSource("torch-export", str(tmp_path / "m.pt2"), device="cpu"))
    assert opened.inputs == (TensorSpec("ids", "INT64", (4,)), TensorSpec("mask", "INT64", (4,)))
    assert opened.outputs == (TensorSpec("logits", "FP32", (4,)), TensorSpec("total", "INT64"))
    x = np.arange(4).reshape(1, 4)
    answer = opened.predict({"ids": x, "mask": x})
    np.testing.assert_array_equal(answer["logits"], (x * x).astype(np.float32))
    np.testing.assert_array_equal(answer["total"], (2 * x).sum(1))


@pytest.mark.parametrize("kind", ["torchscript", "torch-export"])
def test_files_that_are_no_models_are_named(kind: str, tmp_path: Path) -> None:
    (tmp_path / "m").write_bytes(b"no model")
    with pytest.raises(SettingsError, match=f"--{kind} .*/m"):
        open_backends(ModelSource(kind, str(tmp_path / "m"), inputs=("x:float32[4]",)))


def test_rows_must_be_answered_with_rows() -> None:
    with pytest.raises(SettingsError, match=r"for 2 rows, the model returns 'y' of shape \[\]"):
        CallableBackend(lambda inputs: {"y": np.float32(1)}, ["x:float32[4]"])
    with pytest.raises(SettingsError, match=r"for 2 rows, the model returns 'y' of shape \[1, 4\]"):
        CallableBackend(lambda inputs: {"y": inputs["x"][:1]}, ["x:float32[4]"])
    with pytest.raises(TypeError, match="returned NoneType, not a dictionary of arrays"):
        CallableBackend(lambda inputs: None, ["x:float32[4]"])
    with pytest.raises(SettingsError, match="a model must be callable"):
        CallableBackend({"y": 1}, ["x:float32[4]"])  # type: ignore[arg-type]


def test_attributes_describe_a_callable() -> None:
    class Model:
        inputs = ["x:float32[4]"]
        outputs = ["y:float32[4]"]
        version = 7
        warmed, closed = 0, False

        def __call__(self, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
            return {"y": inputs["x"]}

        def warm_up(self, max_rows: int) -> None:
            self.warmed = max_rows

        def close(self) -> None:
            self.closed = True

    model = Model()
    backend = CallableBackend(model)
    assert backend.version == "7"
    backend.warm_up(9)
    backend.close()
    assert (model.warmed, model.closed) == (9, True)
    assert CallableBackend(model, ["x:float16[2]"], ["y:float16[2]"]).inputs[0].datatype == "FP16"


def test_samples_that_are_no_batches(tmp_path: Path) -> None:
    path = tmp_path / "batch.npz"
    source = ModelSource("callable", f"{HERE}predict", sample=str(path))
    with pytest.raises(SettingsError, match=r"--sample: file .*batch\.npz"):
        open_backends(source)
    np.savez(path, x=np.ones((5, 4)), y=np.ones(3))
    with pytest.raises(SettingsError, match="every array needs the same number of rows"):
        open_backends(source)
    np.savez(path, x=np.array([{"a": 1}], object))  # would need unpickling
    with pytest.raises(SettingsError, match=r"not an \.npz file of plain arrays"):
        open_backends(source)
    path.write_bytes(b"PK garbage")
    with pytest.raises(SettingsError, match=r"not an \.npz file"):
        open_backends(source)


TORCH = """
import torch
def predict(inputs):
    x = torch.from_numpy(inputs["x"]).sub_(0.5).div_(0.25)
    return {"y": x.sum(1, keepdim=True).numpy()}
"""

NUMPY = """
def predict(inputs):
    x = inputs["x"]
    x -= 0.5
    x /= 0.25
    return {"y": x.sum(1, keepdims=True)}
"""

OWN_WARM_UP = NUMPY + "predict.warm_up = lambda max_rows: None\n"


@pytest.mark.parametrize(
    ("code", "shared"), [(TORCH, True), (NUMPY, False), (OWN_WARM_UP, True)], ids=["torch", "numpy", "own warm_up"]
)
def test_a_model_may_write_to_inputs(
    inside: StartInside, code: str, shared: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "writing.py").write_text(code + "def make():\n    return predict\n")
    described: dict[str, Any] = {"inputs": ("x:float32[1000]",), "outputs": ("y:float32[1]",), "version": "1"}
    backends = open_backends(ModelSource("factory", f"{tmp_path}/writing.py:make", **described))
    server = inside(list(backends), shared_memory=shared)
    reader = DistillReader(ins=["x"], predicts=["y"], teachers=[server.target])
    reader.set_batch_generator(lambda: ((np.full((32, 1000), number, np.float32),) for number in range(3)))
    with reader:
        answers = [(x[0, 0], y[:, 0].tolist()) for x, y in reader()]
    assert answers == [(number, [(number - 0.5) * 4000] * 32) for number in range(3)]
    assert caplog.text.count("the model writes to its inputs") == 1, caplog.text


def clamp(inputs: Mapping[str, Array]) -> Array:
    """Native code, which does not ask whether it may, and changes no zero."""
    values = (ctypes.c_float * 2).from_address(inputs["x"].ctypes.data)
    values[:] = [max(0.0, min(1.0, value)) for value in values]
    return inputs["x"] * 2


def test_writes_are_found_out() -> None:
    for function, writes in ((clamp, True), (lambda inputs: inputs["x"] * 2, False)):
        backend = CallableBackend(function, ("x:float32[2]", "n:int64[2]", "s:bytes[1]"), ["y:float32[2]"])
        backend.warm_up(4)
        assert backend.writes_inputs is writes
