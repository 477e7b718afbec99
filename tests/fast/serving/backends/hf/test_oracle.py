"""Models of transformers, in batches and behind a server, agree with transformers in process."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edl.errors import SettingsError
from edl_serving import Array
from edl_serving.backends import open_backends
from edl_serving.backends.hf.backends import make_buckets
from edl_serving.backends.source import ModelSource
from tests.fast.serving.fakes import refusal_of

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from edl_serving.backends.hf import backends as language_model  # noqa: E402
from edl_serving.backends.hf.backends import select_top_k  # noqa: E402

Folder = Callable[[str], Path]
LENGTHS = (1, 30, 7, 2, 31, 8, 1, 16)

# Tiny random models, made on the spot, whose logits are spread as a trained model's are.

VOCABULARY = 97
_SIZES = {"vocab_size": VOCABULARY, "num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 32}
_TEXT = {**_SIZES, "intermediate_size": 48, "pad_token_id": 0, "max_position_embeddings": 64}
_LLAMA = {**_TEXT, "num_key_value_heads": 1}
_SOFTCAP = {"head_dim": 16, "final_logit_softcapping": 5.0, "sliding_window": 8}
_LONG = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [1.0, 2.0, 4.0, 8.0, 8.0, 8.0, 8.0, 8.0]}
_PHI3 = {"rope_theta": 10000.0, "original_max_position_embeddings": 16, **_LONG}
_DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
_GPT2 = {"vocab_size": VOCABULARY, "n_layer": 2, "n_head": 2, "n_embd": 32, "n_positions": 48}
_MAMBA = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}

CHECKPOINTS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("Llama", "CausalLM", _LLAMA),
    "gemma2": ("Gemma2", "CausalLM", {**_LLAMA, **_SOFTCAP}),  # changes logits behind its head
    # Has other rotary frequencies in calls of more than 16 tokens.
    "phi3": ("Phi3", "CausalLM", {**_LLAMA, "original_max_position_embeddings": 16, "rope_parameters": _PHI3}),
    # Has rotary frequencies that grow with the longest call so far, beyond 64 tokens.
    "dynamic": ("Llama", "CausalLM", {**_LLAMA, "rope_parameters": _DYNAMIC}),
    "big_bird": ("BigBird", "MaskedLM", _TEXT),
    "gpt2": ("GPT2", "LMHeadModel", _GPT2),
    "bert": ("Bert", "MaskedLM", _TEXT),
    "roberta": ("Roberta", "MaskedLM", {**_TEXT, "pad_token_id": 1}),
    "classifier": ("Bert", "SequenceClassification", {**_TEXT, "num_labels": 3}),
    # Has no token for padding.
    "llama_classifier": ("Llama", "SequenceClassification", {**_LLAMA, "pad_token_id": None, "num_labels": 4}),
    "mamba": ("Mamba", "CausalLM", _MAMBA),  # has a state, which packed sequences would hand on
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Of torch: for models of this size, more of them wait for one another wherever something else has the cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a model of `CHECKPOINTS`."""
    made: dict[str, Path] = {}

    def find(name: str) -> Path:
        if name not in made:
            folder = made[name] = tmp_path_factory.mktemp(name)
            family, task, fields = CHECKPOINTS[name]
            torch.manual_seed(7)
            kind = f"{family}{task}" if task == "LMHeadModel" else f"{family}For{task}"
            model = getattr(transformers, kind)(getattr(transformers, f"{family}Config")(**fields))
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.ndim == 2:
                        parameter.normal_(0, 0.3)
            model.save_pretrained(folder)
        return made[name]

    return find


def load(folder: Path, task: str, **fields: Any) -> Any:
    (backend,) = open_backends(ModelSource("hf", str(folder), task=task, device="cpu", **fields))
    return backend


def tokens(lengths: tuple[int, ...] = LENGTHS, seed: int = 0) -> dict[str, Array]:
    ids = np.random.default_rng(seed).integers(2, VOCABULARY, sum(lengths)).astype(np.int32)
    return {"ids": ids, "position": np.concatenate([np.arange(length, dtype=np.int32) for length in lengths])}


def sequences(inputs: dict[str, Array]) -> list[Any]:
    starts = np.flatnonzero(inputs["position"] == 0)[1:]
    return [torch.from_numpy(ids.astype(np.int64))[None] for ids in np.split(inputs["ids"], starts)]


def oracle(folder: Path, auto: str, inputs: dict[str, Array]) -> Any:
    """Logits of each row, float64, of each sequence by itself."""
    model = getattr(transformers, auto).from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        return torch.cat([model(input_ids=ids).logits[0] for ids in sequences(inputs)]).double()


def assert_agrees(answer: Any, logits: Any, k: int, temperature: float = 1.0) -> None:
    """Ids, log-probabilities and tail are those of `logits`; ids of values closer than the tolerance may differ."""
    expected = logits.log_softmax(-1)
    ids, values, tail = (torch.from_numpy(array) for array in answer["logprobs"])
    assert (ids.shape, values.dtype, tail.dtype) == ((len(logits), k), torch.float32, torch.float32)
    best = expected.topk(k).values
    torch.testing.assert_close(values.double(), best, rtol=0, atol=1e-4)
    torch.testing.assert_close(expected.gather(1, ids.long()), values.double(), rtol=0, atol=1e-4)
    assert all(len(set(row)) == k for row in ids.tolist())
    rest = expected.scatter(1, ids.long(), -torch.inf)
    torch.testing.assert_close(tail.double(), (rest / temperature).logsumexp(-1), rtol=0, atol=1e-4)


@pytest.mark.parametrize(("name", "packing"), [("llama", True), ("gpt2", True), ("gpt2", False), ("gemma2", False)])
def test_causal_models_agree(checkpoint: Folder, name: str, packing: bool) -> None:
    folder = checkpoint(name)
    backend = load(folder, "causal-lm", max_tokens=64, packing=packing)
    inputs = tokens()
    logits = oracle(folder, "AutoModelForCausalLM", inputs)
    targets = np.random.default_rng(1).integers(0, VOCABULARY, (len(logits), 3)).astype(np.int32)
    answer = backend.predict_top_k({**inputs, "targets": targets}, 8, 1.0)
    assert_agrees(answer, logits, 8)
    found = torch.from_numpy(answer["target_logprobs"]).double()
    expected = logits.log_softmax(-1).gather(1, torch.from_numpy(targets).long())
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
    for lengths in ((1,), (48,)):  # a single sequence
        inputs = tokens(lengths, seed=3)
        logits = oracle(folder, "AutoModelForCausalLM", inputs)
        assert_agrees(backend.predict_top_k(inputs, 5, 2.0), logits, 5, 2.0)


@pytest.mark.parametrize(("name", "packing"), [("llama", True), ("gemma2", False)])
def test_half_precision_is_served(checkpoint: Folder, name: str, packing: bool) -> None:
    """Equal but for the rounding of bfloat16; what an architecture does is found out in it as well."""
    inputs = tokens()
    logits = oracle(checkpoint(name), "AutoModelForCausalLM", inputs)
    backend = load(checkpoint(name), "causal-lm", max_tokens=64, dtype="bfloat16", packing=packing)
    ids, values, tail = (torch.from_numpy(array) for array in backend.predict_top_k(inputs, 8, 1.0)["logprobs"])
    assert values.dtype == torch.float32
    error = (values - logits.log_softmax(-1).gather(1, ids.long())).abs()
    assert error.mean() < 0.05 * logits.std()
    total = values.double().exp().sum(-1) + tail.double().exp()
    torch.testing.assert_close(total, torch.ones_like(total), rtol=0, atol=1e-5)
    assert backend._plain_head == (name != "gemma2")


def test_masked_models_agree(checkpoint: Folder) -> None:
    backend = load(checkpoint("roberta"), "masked-lm", max_tokens=128)
    inputs = tokens()
    answer = backend.predict_top_k(inputs, 64, 1.0)
    assert_agrees(answer, oracle(checkpoint("roberta"), "AutoModelForMaskedLM", inputs), 64)
    assert backend.max_top_k == 64
    assert np.isfinite(answer["logprobs"].tail).all()
    assert backend.max_sequence == 64 - 2, "positions begin behind the padding's"
    backend.warm_up(4096)


def test_features_agree(checkpoint: Folder) -> None:
    backend = load(checkpoint("bert"), "feature-extraction", max_tokens=128)
    model = transformers.AutoModel.from_pretrained(checkpoint("bert")).eval()
    inputs = tokens()
    with torch.inference_mode():
        expected = torch.cat([model(input_ids=ids).last_hidden_state[0] for ids in sequences(inputs)])
    torch.testing.assert_close(torch.from_numpy(backend.predict(inputs)["hidden"]), expected, rtol=0, atol=1e-4)
    assert (backend.max_top_k, backend.sequence_input) == (None, "position")


@pytest.mark.parametrize("name", ["classifier", "llama_classifier"])
def test_classifiers_agree(checkpoint: Folder, name: str) -> None:
    backend = load(checkpoint(name), "sequence-classification", max_tokens=64)
    texts = sequences(tokens())
    model = transformers.AutoModelForSequenceClassification.from_pretrained(checkpoint(name)).eval()
    with torch.inference_mode():
        expected = torch.cat([model(input_ids=ids).logits for ids in texts])
    rows = np.array([ids.numpy().astype("<i4").tobytes() for ids in texts], object)
    backend.check_inputs({"ids": rows}, 1.0)
    torch.testing.assert_close(torch.from_numpy(backend.predict({"ids": rows})["logits"]), expected, rtol=0, atol=1e-4)


def test_a_head_is_sliced_where_it_may_be(checkpoint: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(language_model, "rows_of_slice", lambda vocabulary, device: 10)
    inputs = tokens((25, 25))
    for name, largest in (("llama", 10), ("gemma2", 50)):
        seen: list[int] = []
        backend = load(checkpoint(name), "causal-lm", max_tokens=64)
        head = backend._model.get_output_embeddings()
        hook = head.register_forward_hook(lambda module, args, output, seen=seen: seen.append(output[..., 0].numel()))
        logits = oracle(checkpoint(name), "AutoModelForCausalLM", inputs)
        assert_agrees(backend.predict_top_k(inputs, 4, 1.0), logits, 4)
        hook.remove()
        assert max(seen) == largest, f"{name}: logits of that many rows at once"


def test_equal_logits_go_by_rising_id() -> None:
    logits = torch.tensor([[1.0, 3, 3, 0, 3, 3], [2, 2, 2, 2, 2, 2], [5, -torch.inf, -torch.inf, -torch.inf, 1, 1]])
    for k in range(1, 7):
        found = select_top_k(logits.clone(), k, 1.0, None)
        assert found.ids.tolist() == [ids[:k] for ids in ([1, 2, 4, 5, 0, 3], [0, 1, 2, 3, 4, 5], [0, 4, 5, 1, 2, 3])]
        total = found.values.exp().sum(-1) + found.tail.exp()
        torch.testing.assert_close(total, torch.ones(3))
    wide = torch.randint(4, (3, 400), generator=torch.Generator().manual_seed(1)).bfloat16()
    for k in (1, 30, 170, 300, 400):  # with the most and the fewest equal logits that `topk` leaves out
        expected = wide.sort(dim=-1, descending=True, stable=True).indices[:, :k]
        assert torch.equal(select_top_k(wide, k, 1.0, None).ids, expected.int()), k


@pytest.mark.parametrize(
    ("name", "task", "fields", "said"),
    [
        ("bert", "causal-lm", {}, "BertLMHeadModel lets tokens attend to later ones.*masked-lm"),
        ("mamba", "causal-lm", {"packing": True}, "--packing: MambaForCausalLM does not keep packed sequences apart"),
        ("bert", "sequence-classification", {}, "lacks bert.pooler.*weights: 4.*a --task other"),
        ("llama", "text-generation", {}, "--hf needs --task, one of causal-lm"),
        ("llama", "causal-lm", {"dtype": "int8"}, "--dtype 'int8'"),
        ("bert", "feature-extraction", {"top_k": 4}, "--top-k does not apply to --task feature-extraction"),
    ],
)
def test_what_cannot_be_served(checkpoint: Folder, name: str, task: str, fields: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingsError, match=f"(?s){said}"):
        load(checkpoint(name), task, max_tokens=32, **fields)


def test_folders_that_cannot_be_served(checkpoint: Folder, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"no folder with a config.json"):
        load(tmp_path / "nowhere", "causal-lm")
    (tmp_path / "config.json").write_text((checkpoint("llama") / "config.json").read_text())
    (tmp_path / "pytorch_model.bin").write_bytes(b"a pickle")
    with pytest.raises(SettingsError, match=r"no .safetensors file"):
        load(tmp_path, "causal-lm")
    (tmp_path / "model.safetensors").write_bytes(b"garbage")
    with pytest.raises(SettingsError, match=r"as causal-lm: "):
        load(tmp_path, "causal-lm")
    (tmp_path / "config.json").write_text(
        '{"model_type": "own", "auto_map": {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}}'
    )
    (tmp_path / "own.py").write_text("raise SystemExit('the code of a checkpoint was run')")
    with pytest.raises(SettingsError, match=r"trust_remote_code|custom code"):
        load(tmp_path, "causal-lm")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(SettingsError, match=r"config.json"):
        load(tmp_path, "causal-lm")


def test_sequences_are_as_long_as_positions(checkpoint: Folder, caplog: pytest.LogCaptureFixture) -> None:
    backend = load(checkpoint("gpt2"), "causal-lm")
    assert backend.max_sequence == 48
    assert backend.instance_meta == {}
    assert "students cannot compare tokenizers with this teacher" in caplog.text
    assert load(checkpoint("llama"), "causal-lm", max_tokens=20).max_sequence == 20
    assert load(checkpoint("mamba"), "causal-lm").max_sequence == 8192


def test_ids_that_no_model_has(checkpoint: Folder) -> None:
    backend = load(checkpoint("llama"), "causal-lm")
    inputs = tokens((4,))
    backend.check_inputs(inputs, 1.0)
    for value in (-1, VOCABULARY):
        wrong = {**inputs, "ids": np.array([5, 5, value, 5], np.int32)}
        said = refusal_of(lambda wrong=wrong: backend.check_inputs(wrong, 1.0))
        assert said == f"input 'ids' is {value} in row 2, but token ids of this model are 0 to 96"
    wrong = {**inputs, "targets": np.array([[5, 5], [5, VOCABULARY], [5, 5], [5, 5]], np.int32)}
    assert "'targets' is 97 in row 1" in refusal_of(lambda: backend.check_inputs(wrong, 1.0))
    classifier = load(checkpoint("classifier"), "sequence-classification")
    for row, said in ((b"", "0 bytes in row 1"), (b"abc", "3 bytes"), (b"\xff" * 4, "token -1 in row 1")):
        texts = {"ids": np.array([np.ones(2, "<i4").tobytes(), row], object)}
        assert said in refusal_of(lambda texts=texts: classifier.check_inputs(texts, 1.0))
    long = {"ids": np.array([np.ones(65, "<i4").tobytes()], object)}
    assert "65 tokens in row 0" in refusal_of(lambda: classifier.check_inputs(long, 1.0))


def test_versions_differ_with_the_weights(checkpoint: Folder, tmp_path: Path) -> None:
    folder = shutil.copytree(checkpoint("llama"), tmp_path / "elsewhere")
    first = load(checkpoint("llama"), "causal-lm").version
    assert load(folder, "causal-lm", top_k=3).version == first
    assert load(folder, "causal-lm", dtype="bfloat16").version != first
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (folder / "model.safetensors").write_bytes(data)
    assert load(folder, "causal-lm").version != first


MIXED_LENGTHS = (15, 17, 16, 20, 3, 30, 14, 64)
"""On both sides of 16 tokens, similar ones among them."""


@pytest.mark.parametrize(("name", "packing"), [("phi3", False), ("phi3", True), ("dynamic", True)])
def test_neighbours_change_nothing(checkpoint: Folder, name: str, packing: bool) -> None:
    backend = load(checkpoint(name), "causal-lm", packing=packing)
    for lengths in (MIXED_LENGTHS, (12,), (64, 64), (12, 13)):
        inputs = tokens(lengths)
        logits = oracle(checkpoint(name), "AutoModelForCausalLM", inputs)
        assert_agrees(backend.predict_top_k(inputs, 8, 1.0), logits, 8)


def test_padding_without_embedding(checkpoint: Folder, tmp_path: Path) -> None:
    """A token for padding was added to the tokenizer, and the model has no place for it: nobody may look it up."""
    folder = shutil.copytree(checkpoint("gpt2"), tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "pad_token_id": VOCABULARY}))
    inputs = tokens((5, 7, 6))
    answer = load(folder, "causal-lm").predict_top_k(inputs, 8, 1.0)
    assert_agrees(answer, oracle(folder, "AutoModelForCausalLM", inputs), 8)


def test_dynamic_frequencies_have_an_end(checkpoint: Folder) -> None:
    backend = load(checkpoint("dynamic"), "causal-lm")
    assert backend.max_sequence == 64
    with pytest.raises(SettingsError, match=r"beyond 64 tokens, .* depend on earlier calls .*--max-tokens 64"):
        type(backend)(replace(backend._loaded, longest=65), 8, causal=True, packing=False)


def test_attention_that_switches_is_refused(checkpoint: Folder) -> None:
    with pytest.raises(SettingsError, match=r"BigBirdForMaskedLM .*original_full"):
        load(checkpoint("big_bird"), "masked-lm")


def test_other_dependence_is_found_out(checkpoint: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the configuration says nothing, and the loaded model does so all the same."""
    model: Any = load(checkpoint("phi3"), "causal-lm")
    config = model._model.config
    monkeypatch.setitem(config.rope_parameters, "rope_type", "unheard-of")
    with pytest.raises(SettingsError, match=r"Phi3ForCausalLM .* change with the lengths of other sequences"):
        type(model)(model._loaded, 8, causal=True, packing=False)


@settings(max_examples=30)
@given(st.lists(st.integers(1, 300), min_size=1, max_size=60), st.integers(1, 2000), st.booleans())
def test_each_row_is_computed_once(lengths: list[int], max_tokens: int, padding: bool) -> None:
    position = np.concatenate([np.arange(length, dtype=np.int32) for length in lengths])
    buckets = make_buckets(np.flatnonzero(position == 0), len(position), max_tokens, padding=padding)
    rows = np.concatenate([bucket.rows[bucket.valid] for bucket in buckets])
    np.testing.assert_array_equal(np.sort(rows), np.arange(len(position)))
    for bucket in buckets:
        sequences, length = bucket.valid.shape
        assert sequences == 1 or sequences * length <= max_tokens
        assert bucket.valid[:, 0].all()
        assert (position[bucket.rows[:, 0]] == 0).all()
        for line, valid in zip(bucket.rows, bucket.valid, strict=True):
            np.testing.assert_array_equal(position[line[valid]], np.arange(valid.sum()))
        assert padding or not bucket.padded
