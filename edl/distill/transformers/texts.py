"""Finds the texts in a collator's batch, padded on either side or packed end to end.

A batch without an attention mask whose position ids begin again holds several texts in a row, as
`DataCollatorWithFlattening` makes it, and transformers' attention keeps them apart by these position ids.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from edl.errors import SettingsError
from edl.protocol.arrays import as_array
from edl.protocol.tensors import Array

__all__ = ["IGNORED", "Texts", "check_token_types", "find_texts", "learned_rows", "next_tokens", "text_bytes"]

IGNORED = -100
"""The label of a token that is not to be learned, in transformers and torch."""

_BOUNDARIES = ("cu_seq_lens_q", "cu_seqlens", "seq_idx", "segment_ids")
"""Names that padding-free collators use for the boundaries of texts, in addition to position ids."""


@dataclass(frozen=True)
class Texts:
    """The texts of a batch."""

    ids: Array  # [texts, longest], token ids
    mask: Array  # [texts, longest], what is a token
    packed: bool  # whether these are not the batch's own rows: their tokens, in order, are all of the batch


def find_texts(batch: Mapping[str, Any]) -> Texts:
    """Return the texts of a batch.

    Raises:
        SettingsError: it cannot be told where texts begin.
    """
    ids, mask, positions = (_array(batch, name) for name in ("input_ids", "attention_mask", "position_ids"))
    if ids is None or ids.ndim != 2:
        found = sorted(batch) if ids is None else f"input_ids of shape {list(ids.shape)}"
        raise SettingsError(f"the batch has {found}: teachers of tokens need input_ids [rows, length]")
    if positions is None:
        named = [name for name in _BOUNDARIES if name in batch]
        if named and mask is None:
            raise SettingsError(
                f"the batch has {named[0]} and no position_ids, so rows hold several texts, which would be taken for "
                "one: have the collator return position_ids (DataCollatorWithFlattening(return_position_ids=True))"
            )
        return Texts(ids, np.ones(ids.shape, np.int8) if mask is None else mask, False)
    if positions.ndim != 2 or positions.shape[1] != ids.shape[1]:
        raise SettingsError(f"position_ids are {list(positions.shape)}: expected one for each token, [rows, length]")
    positions = np.broadcast_to(positions, ids.shape)
    if mask is not None:
        if mask.shape == ids.shape and any(
            _starts(row[kept != 0])[1:].any() for row, kept in zip(positions, mask, strict=True)
        ):
            raise SettingsError(
                "position_ids begin again in a row that has an attention_mask: the student would attend across its "
                "texts, and the teachers would not. Leave the attention_mask out, as DataCollatorWithFlattening does"
            )
        return Texts(ids, mask, False)
    starts = np.stack([_starts(row) for row in positions])
    first = positions[starts]
    if first.size and (first != first[0]).any():
        raise SettingsError(
            f"position_ids begin at {sorted(set(first.tolist()))[:4]}: those of each text must rise by 1 from the same "
            "number, so that it can be told where texts begin"
        )
    if not starts[:, 1:].any():
        return Texts(ids, np.ones(ids.shape, np.int8), False)
    lengths = np.diff([*np.flatnonzero(starts), starts.size])
    kept = np.arange(lengths.max()) < lengths[:, None]
    texts = np.zeros(kept.shape, ids.dtype)
    texts[kept] = ids.reshape(-1)
    return Texts(texts, kept.astype(np.int8), True)


def check_token_types(batch: Mapping[str, Any], texts: Texts) -> None:
    """Check that a batch's texts are no pairs, whose second text has another token type: teachers get ids alone."""
    types = _array(batch, "token_type_ids")
    if types is None:
        return
    if not texts.packed and types.shape == texts.mask.shape:
        types = types[texts.mask != 0]
    if types.any():
        raise SettingsError(
            f"token_type_ids hold {int(types.max())}, as of pairs of texts, and `edl serve --hf` takes ids alone, "
            "all of type 0: its labels would be others. Serve a function that takes them and name its inputs, "
            'inputs={"ids": ..., "token_type_ids": "token_type_ids"}; or leave them out for teacher and student '
            "(return_token_type_ids=False of the tokenizer), if the teacher was trained so"
        )


def text_bytes(batch: Mapping[str, Any]) -> Array:
    """Return each text's token ids as little-endian int32 in bytes, as `edl serve --hf` takes texts to classify."""
    texts = find_texts(batch)
    check_token_types(batch, texts)
    rows = zip(texts.ids, texts.mask, strict=True)
    return np.array([ids[kept != 0].astype("<i4").tobytes() for ids, kept in rows], dtype=object)


def learned_rows(batch: Mapping[str, Any], *, shifted: bool) -> torch.Tensor:
    """Return the mask bool [rows, length] of the tokens whose prediction is learned.

    `batch`: with `labels`, or where all tokens are learned without.
    """
    ids, attended = batch["input_ids"], batch.get("attention_mask")
    rows = next_tokens(batch, shifted=shifted) != IGNORED
    if attended is not None:
        rows &= attended != 0  # padding on the left: the last of it would predict the first token
    elif shifted and batch.get("position_ids") is not None:
        positions = batch["position_ids"].expand(ids.shape)
        rows[:, :-1] &= positions[:, 1:] == positions[:, :-1] + 1  # the last token of a text predicts no other's
    return rows


def next_tokens(batch: Mapping[str, Any], *, shifted: bool) -> torch.Tensor:
    """Return what each row is to predict, [rows, length], and -100 where that is nothing."""
    tokens: torch.Tensor
    if shifted and batch.get("shift_labels") is not None:
        tokens = batch["shift_labels"]
        return tokens
    if batch.get("labels") is not None:
        tokens = batch["labels"]
    else:
        tokens, attended = batch["input_ids"], batch.get("attention_mask")
        tokens = tokens if attended is None else tokens.masked_fill(attended == 0, IGNORED)
    return torch.nn.functional.pad(tokens[:, 1:], (0, 1), value=IGNORED) if shifted else tokens


def _array(batch: Mapping[str, Any], name: str) -> Array | None:
    value = batch.get(name)
    return None if value is None else as_array(value, name)


def _starts(positions: Array) -> Array:
    """Return where a text begins, bool [tokens]: at the first token, and where positions do not rise by 1."""
    starts = np.ones(positions.shape, bool)
    starts[1:] = positions[1:] != positions[:-1] + 1
    return starts
