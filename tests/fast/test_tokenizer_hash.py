"""The hash of a tokenizer says which token each id is, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from edl.errors import SettingsError
from edl.tokenizer_hash import hash_tokenizer, resolve_tokenizer

_TOKENIZER = {
    "version": "1.0",
    "truncation": None,
    "padding": None,
    "added_tokens": [{"id": 2, "content": "<s>", "special": True}],
    "model": {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": []},
}


def _write(place: Path, **changes: object) -> Path:
    place.parent.mkdir(exist_ok=True)
    place.write_text(json.dumps({**_TOKENIZER, **changes}, indent=2))
    return place


def test_only_ids_count(tmp_path: Path) -> None:
    """Neither where the file is, nor padding, nor the scores of a unigram model."""
    path = _write(tmp_path / "model/tokenizer.json")
    expected = hash_tokenizer(path)
    assert expected.startswith("sha256:")
    padded = _write(tmp_path / "b.json", padding={"pad_id": 1}, truncation={"max_length": 5}, version="1.1")
    scored = _write(tmp_path / "c.json", model={"vocab": [["a", -1.5], ["b", -2.5]]})
    for place in (str(path.parent), padded, scored):
        assert hash_tokenizer(place) == expected
        assert resolve_tokenizer(place) == expected
    assert resolve_tokenizer(expected) == expected
    assert resolve_tokenizer("") == ""


@pytest.mark.parametrize(
    "changes",
    [
        {"model": {"vocab": {"a": 1, "b": 0}}},
        {"added_tokens": []},
        {"added_tokens": [{"id": 2, "content": "<t>"}]},
        {"model": {"vocab": [["a", -1.5], ["b", -2.5], ["c", -3.5]]}},
    ],
)
def test_other_ids_differ(tmp_path: Path, changes: dict[str, object]) -> None:
    assert hash_tokenizer(_write(tmp_path / "a.json")) != hash_tokenizer(_write(tmp_path / "b.json", **changes))


def test_files_without_json(tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_text("a\nb\n")
    before = hash_tokenizer(tmp_path)
    (tmp_path / "merges.txt").write_text("a b\n")
    assert hash_tokenizer(tmp_path) != before


def _model(folder: Path, name: str, content: object) -> Path:
    folder.mkdir()
    (folder / "tokenizer.model").write_bytes(b"pieces")
    (folder / name).write_text(json.dumps(content))
    return folder


def test_added_tokens_without_json_count(tmp_path: Path) -> None:
    """Two models of one base may have added the same tokens in another order."""

    def decoder(*tokens: str) -> dict[str, object]:
        return {"added_tokens_decoder": {str(100 + i): {"content": token} for i, token in enumerate(tokens)}}

    config = "tokenizer_config.json"
    base = hash_tokenizer(_model(tmp_path / "base", config, {"model_max_length": 5}))
    first = hash_tokenizer(_model(tmp_path / "a", "added_tokens.json", {"<a>": 100, "<b>": 101}))
    swapped = hash_tokenizer(_model(tmp_path / "b", "added_tokens.json", {"<b>": 100, "<a>": 101}))
    assert len({base, first, swapped}) == 3
    assert hash_tokenizer(_model(tmp_path / "c", config, decoder("<a>", "<b>"))) == first
    assert hash_tokenizer(_model(tmp_path / "d", config, decoder("<b>", "<a>"))) == swapped
    assert hash_tokenizer(_model(tmp_path / "e", config, {"model_max_length": 9})) == base


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("added_tokens.json", ["<a>"]),
        ("tokenizer_config.json", []),
        ("tokenizer_config.json", {"added_tokens_decoder": {"3": "<a>"}}),
    ],
)
def test_odd_added_tokens_are_refused(tmp_path: Path, name: str, content: object) -> None:
    with pytest.raises(SettingsError, match=rf"{name}.*added tokens cannot be read"):
        hash_tokenizer(_model(tmp_path / "model", name, content))


@pytest.mark.parametrize("content", ["", "[]", '{"model": {}}', '{"model": {"vocab": [3]}}'])
def test_other_json_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(content)
    with pytest.raises(SettingsError, match=r"tokenizer\.json"):
        hash_tokenizer(path)
