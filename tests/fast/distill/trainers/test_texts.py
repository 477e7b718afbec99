"""Where texts begin in batches of collators, and what of them is learned."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
pytest.importorskip("transformers", "5.23", reason="transformers is not installed, or too old")

from edl.distill.transformers.texts import find_texts, learned_rows, next_tokens, text_bytes  # noqa: E402
from edl.errors import SettingsError  # noqa: E402

IDS = [[5, 6, 7, 8, 9, 4]]


def batch(**fields: Any) -> dict[str, Any]:
    return {name: torch.tensor(value) for name, value in {"input_ids": IDS, **fields}.items()}


@pytest.mark.parametrize("first", [0, 2])
def test_packed_texts_are_taken_apart(first: int) -> None:
    positions = [[first + at for at in (0, 1, 2, 0, 0, 1)]]
    found = find_texts(batch(position_ids=positions))
    assert found.packed
    assert [ids[kept != 0].tolist() for ids, kept in zip(found.ids, found.mask, strict=True)] == [
        [5, 6, 7],
        [8],
        [9, 4],
    ]
    learned = learned_rows(batch(position_ids=positions), shifted=True)
    assert learned.tolist() == [[True, True, False, False, True, False]]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"position_ids": [[0, 1, 2, 0, 1, 2]], "attention_mask": [[1] * 6]}, "attend across"),
        ({"position_ids": [[0, 1, 2, 5, 6, 7]]}, "begin at"),
        ({"position_ids": [[[0, 1, 2, 3, 4, 5]]]}, "one for each token"),
        ({"cu_seq_lens_q": [0, 3, 6]}, "no position_ids"),
        ({"input_ids": [1, 2, 3]}, "shape"),
    ],
    ids=["both", "jump", "three axes", "boundaries", "one axis"],
)
def test_texts_that_cannot_be_told_apart(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        find_texts(batch(**fields))


def test_a_batch_without_ids() -> None:
    with pytest.raises(SettingsError, match="inputs_embeds"):
        find_texts({"inputs_embeds": torch.zeros(1, 2, 3)})


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"position_ids": [[0, 1, 2, 3, 4, 5]]},
        {"attention_mask": [[0, 0, 1, 1, 1, 1]], "position_ids": [[1, 1, 0, 1, 2, 3]]},
    ],
    ids=["alone", "positions", "left"],
)
def test_rows_of_one_text(fields: dict[str, Any]) -> None:
    found = find_texts(batch(**fields))
    assert not found.packed
    assert np.array_equal(found.ids, IDS)
    assert found.mask.tolist() == fields.get("attention_mask", [[1] * 6])


def test_what_is_learned() -> None:
    left = {"attention_mask": [[0, 0, 1, 1, 1, 1]]}
    assert learned_rows(batch(**left), shifted=True).tolist() == [[False, False, True, True, True, False]]
    own = {"labels": [[-100, -100, 7, 8, -100, 4]]}
    assert learned_rows(batch(**own), shifted=True).tolist() == [[False, True, True, False, True, False]]
    assert learned_rows(batch(**own), shifted=False).tolist() == [[False, False, True, True, False, True]]
    given = {"shift_labels": [[6, -100, 8, -100, -100, -100]], **own}
    assert next_tokens(batch(**given), shifted=True).tolist() == given["shift_labels"]


def test_texts_as_bytes() -> None:
    found = text_bytes(batch(input_ids=[[0, 5, 6], [7, 8, 9]], attention_mask=[[0, 1, 1], [1, 1, 1]]))
    assert [np.frombuffer(text, "<i4").tolist() for text in found] == [[5, 6], [7, 8, 9]]
