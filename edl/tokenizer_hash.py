"""Hashes tokenizers. If the hashes of teacher and student are equal, every id means the same token for both."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from edl.errors import SettingsError

_PREFIX = "sha256:"
_FILES = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "vocab.json", "vocab.txt", "merges.txt")
"""Vocabulary files of tokenizers without a tokenizer.json, as transformers names them; all of these files that exist
are hashed."""


def hash_tokenizer(path: str | Path) -> str:
    """Return the hash of a tokenizer: "sha256:" and 64 hexadecimal digits.

    For a `tokenizer.json`, the hash covers the token of each id, but not how text is normalized, padded or truncated: a
    trainer that saves a tokenizer may change these settings, while the ids keep their meaning. For a folder without a
    `tokenizer.json`, the hash covers the vocabulary files and the ids of added tokens (`added_tokens.json`,
    `added_tokens_decoder` in `tokenizer_config.json`). `path` is one of these files, or a folder that contains them,
    such as a model's folder.
    """
    place = Path(path).expanduser()
    try:
        if place.is_dir():
            if (place / "tokenizer.json").is_file():
                return _hash_json(place / "tokenizer.json")
            files = [place / name for name in _FILES if (place / name).is_file()]
            if not files:
                raise SettingsError(f"{str(place)!r}: contains neither tokenizer.json nor any of {', '.join(_FILES)}")
            return _hash_files(files, _added_ids(place))
        return _hash_json(place) if place.suffix == ".json" else _hash_files([place])
    except OSError as exc:
        raise SettingsError(f"tokenizer {str(place)!r}: {exc.strerror or exc}") from exc


def resolve_tokenizer(tokenizer: str | Path) -> str:
    """Return the hash for a tokenizer given as a path or a hash; an empty value (any tokenizer) stays empty."""
    text = str(tokenizer)
    if not text or text.startswith(_PREFIX):
        return text
    if not Path(text).expanduser().exists():
        raise SettingsError(
            f"tokenizer={text!r}: neither a tokenizer's file or folder on this machine nor a hash ({_PREFIX}...)"
        )
    return hash_tokenizer(text)


def _hash_json(path: Path) -> str:
    try:
        content = json.loads(path.read_bytes())
        vocabulary = content["model"]["vocab"]
        added = {str(entry["content"]): int(entry["id"]) for entry in content.get("added_tokens") or ()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as exc:
        raise SettingsError(f"tokenizer {str(path)!r}: not a tokenizer.json: {type(exc).__name__} {exc}") from exc
    return _PREFIX + hashlib.sha256(_canonical({**_ids(vocabulary, path), **added})).hexdigest()


def _ids(vocabulary: Any, path: Path) -> dict[str, int]:
    """Return ids by token. A Unigram vocabulary is a list of [token, score] in the order of ids."""
    try:
        if isinstance(vocabulary, list):
            return {str(entry[0]): number for number, entry in enumerate(vocabulary)}
        return {str(token): int(number) for token, number in vocabulary.items()}
    except (ValueError, TypeError, AttributeError, IndexError) as exc:
        raise SettingsError(f"tokenizer {str(path)!r}: unknown kind of vocabulary: {exc}") from exc


def _canonical(ids: dict[str, int]) -> bytes:
    return json.dumps(sorted(ids.items()), separators=(",", ":")).encode()


def _added_ids(folder: Path) -> dict[str, int]:
    """Return the ids of added tokens, by token, from the files in which transformers keeps these tokens."""
    found: dict[str, int] = {}
    config, added = folder / "tokenizer_config.json", folder / "added_tokens.json"
    path = config
    try:
        if config.is_file():
            decoder = json.loads(config.read_bytes()).get("added_tokens_decoder") or {}
            found |= {str(entry["content"]): int(number) for number, entry in decoder.items()}
        path = added
        if added.is_file():
            found |= {str(token): int(number) for token, number in json.loads(added.read_bytes()).items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as exc:
        raise SettingsError(f"tokenizer {str(path)!r}: its added tokens cannot be read: {exc!r}") from exc
    return found


def _hash_files(paths: list[Path], added: dict[str, int] | None = None) -> str:
    total = hashlib.sha256(_canonical(added) if added else b"")
    for path in paths:
        total.update(f"{path.name} {hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return _PREFIX + total.hexdigest()
