"""Teachers on a GPU answer what the same model answers when it is called directly."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from edl.distill import DistillReader
from edl.testing import LocalTeacher
from tests.gpu import models

ROWS = 32
"""Rows of a request, and of the teacher's batch: convolutions of other sizes may take other algorithms, and bits."""
TOP_K = 16


def image_settings(device: torch.device) -> tuple[dict[str, Any], int]:
    """Return options of the ResNet and the images' height: the real ones on a GPU, small ones on a CPU."""
    return ({"width": 64, "classes": 1000}, 224) if device.type == "cuda" else ({"width": 8, "classes": 10}, 32)


def serve_resnet(device: torch.device, autocast: str | None = None, **serve: Any) -> LocalTeacher:
    options, size = image_settings(device)
    flags: dict[str, Any] = {
        "torch-factory": f"{models.FILE}:resnet50",
        "input": f"image:uint8[3,{size},{size}]",
        "output": "logits",
        "normalize": "imagenet",
        "device": str(device),
        "threads": 1,  # on a CPU, sums are split among threads
        **serve,
    }
    if autocast:
        flags["autocast"] = autocast
    environment = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    return LocalTeacher(
        "", max_batch=ROWS, serve=flags, env=environment, timeout_s=120, **options, deterministic=autocast is None
    )


def label(teachers: str, images: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the logits of images from teachers, in requests of `ROWS`."""
    reader = DistillReader(ins=["image"], predicts=["logits"], teachers=teachers)
    reader.set_batch_generator(lambda: ((part,) for part in np.split(images, len(images) // ROWS)))
    with reader:
        return np.concatenate([logits for _, logits in reader()])


@pytest.fixture(scope="module")
def images(device: torch.device) -> np.ndarray[Any, Any]:
    size = image_settings(device)[1]
    return np.random.default_rng(5).integers(256, size=(2 * ROWS, 3, size, size), dtype=np.uint8)


def local_logits(device: torch.device, images: np.ndarray[Any, Any]) -> torch.Tensor:
    """Return the logits of the same model in this process, in float32, by the documented normalization."""
    model = models.resnet50(**image_settings(device)[0]).to(device).eval()
    mean, deviation = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])
    scale, shift = torch.from_numpy(1 / (255 * deviation)).float(), torch.from_numpy(-mean / deviation).float()
    found = []
    with torch.inference_mode():
        for part in np.split(images, len(images) // ROWS):
            pixels = torch.from_numpy(part).to(device).float()
            pixels = pixels.mul_(scale.view(-1, 1, 1).to(device)).add_(shift.view(-1, 1, 1).to(device))
            found.append(model(pixels).cpu())
    return torch.cat(found)


@pytest.fixture
def deterministic() -> Iterator[None]:
    before = torch.backends.cudnn.allow_tf32, torch.get_num_threads()
    models.be_deterministic()
    torch.set_num_threads(1)
    yield
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.allow_tf32 = before[0]
    torch.set_num_threads(before[1])


@pytest.mark.usefixtures("deterministic")
def test_float32_labels_are_bit_equal(device: torch.device, images: np.ndarray[Any, Any]) -> None:
    with serve_resnet(device) as teacher:
        found = label(teacher.endpoint, images)
    assert np.array_equal(found, local_logits(device, images).numpy())


@pytest.mark.parametrize(("autocast", "bound"), [("bfloat16", 0.1), ("float16", 0.02)])
def test_half_precision_labels_are_close(
    device: torch.device, images: np.ndarray[Any, Any], autocast: str, bound: float
) -> None:
    """The bounds are of the logits' standard deviation: some roundings of 2^-8 and 2^-11 through 50 layers."""
    expected = local_logits(device, images)
    with serve_resnet(device, autocast) as teacher:
        found = torch.from_numpy(label(teacher.endpoint, images))
    assert (found - expected).abs().max() <= bound * expected.std()


def test_two_services_share_a_gpu(device: torch.device, images: np.ndarray[Any, Any]) -> None:
    """Each answers with its own model while the other one computes."""
    with ExitStack() as stack:
        teachers = [stack.enter_context(serve_resnet(device)) for _ in range(2)]
        both = label(",".join(teacher.endpoint for teacher in teachers), np.concatenate([images] * 4))
        alone = label(teachers[1].endpoint, images)
    for part in np.split(both, 4):
        np.testing.assert_allclose(part, alone, rtol=1e-4, atol=1e-4)


class HostCopies(TorchDispatchMode):
    """Notes the elements of tensors that are copied from the GPU to the host."""

    def __init__(self) -> None:
        super().__init__()
        self.elements: list[int] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        source = args[0] if args and isinstance(args[0], torch.Tensor) else None
        leaves_gpu = source is not None and source.device.type == "cuda"
        if leaves_gpu and isinstance(result, torch.Tensor) and result.device.type == "cpu":
            self.elements.append(result.numel())
        return result


@pytest.fixture(scope="module")
def language_model(device: torch.device, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A Llama of about 1 billion parameters on a GPU, a tiny one on a CPU: its folder and itself."""
    pytest.importorskip("transformers", reason="transformers is not installed")
    folder = tmp_path_factory.mktemp("llama")
    large, small = {"hidden": 2048, "layers": 16, "vocabulary": 32_000}, {"hidden": 128, "layers": 2, "vocabulary": 500}
    sizes = large if device.type == "cuda" else small
    return folder, models.llama(folder, **sizes, dtype=torch.bfloat16).to(device)


def log_probabilities(
    folder: Path, texts: list[np.ndarray[Any, Any]], dtype: str, device: torch.device
) -> list[torch.Tensor]:
    """Return the log-probabilities that the model in a folder computes for each text alone."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device)
    with torch.inference_mode():
        logits = [model(torch.from_numpy(text)[None].to(model.device)).logits[0].float() for text in texts]
    return [torch.log_softmax(found, -1).cpu() for found in logits]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_language_model_labels(device: torch.device, language_model: tuple[Path, Any], dtype: str) -> None:
    """The most likely tokens and their log-probabilities are those of a float32 pass of each sequence alone.

    With bfloat16 they may be twice as far from them as a local bfloat16 pass is.
    """
    folder, model = language_model
    vocabulary = model.config.vocab_size
    random = np.random.default_rng(6)
    texts = [random.integers(1, vocabulary, size=length) for length in (3, 40, 200, 17)]
    flags = {"hf": folder, "task": "causal-lm", "top-k": TOP_K, "dtype": dtype, "device": str(device)}
    with LocalTeacher("", serve=flags, timeout_s=150) as teacher:
        reader = DistillReader(ins=["ids"], predicts=["logprobs"], teachers=teacher.endpoint, top_k=TOP_K)
        reader.set_sequence_generator(lambda: ((text,) for text in texts))
        with reader:
            answers = [labels for _, labels in reader()]
    exact, rounded = (log_probabilities(folder, texts, name, device) for name in ("float32", dtype))
    for expected, local, labels in zip(exact, rounded, answers, strict=True):
        ids = torch.from_numpy(np.asarray(labels.ids, np.int64))
        values = torch.from_numpy(np.asarray(labels.values, np.float32))
        found_at = expected.gather(1, ids)
        bound = max(1e-3, 2 * float((found_at - local.gather(1, ids)).abs().max()))
        assert (found_at - values).abs().max() <= bound
        least = expected.topk(TOP_K).values[:, -1]
        assert (found_at.min(1).values >= least - 2 * bound).all(), "none is missing that is more likely"


def test_top_k_is_found_on_the_device(device: torch.device, language_model: tuple[Path, Any]) -> None:
    """What leaves the GPU is k ids and values per token, and not a vocabulary's."""
    from edl_serving.backends.hf.backends import LanguageModelBackend, LoadedModel

    _, model = language_model
    backend = LanguageModelBackend(LoadedModel(model, "1", {}, 1024, 1024), TOP_K, causal=True, packing=False)
    ids, position = np.arange(1, 101, dtype=np.int32), np.tile(np.arange(50, dtype=np.int32), 2)
    with HostCopies() as copies:
        answer = backend.predict_top_k({"ids": ids, "position": position}, TOP_K, 1.0)
    assert answer
    assert max(copies.elements, default=0) <= len(ids) * TOP_K
    assert bool(copies.elements) == (device.type == "cuda")
