"""What is read of a request and written of an answer, and who may come in."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import numpy as np
import pytest

from edl.distill.compress import TopK
from edl.proxy.admission import TokenGate
from edl.proxy.completion_request import RequestRefusal, read_request
from edl.proxy.completion_response import answer_head, answer_tail, encode_choice
from edl.proxy.settings import ProxySettings
from tests.waiting import DEADLINE_S

GOOD = {"model": "m", "prompt": [[1, 2], [3]], "max_tokens": 1, "prompt_logprobs": 2}

NEUTRAL: dict[str, list[Any]] = {
    "model": [None],
    "temperature": [1, 0.0],
    "max_tokens": [0],
    "n": [1],
    "prompt_embeds": [None, False],
    "truncate_prompt_tokens": [None, False],
}


def read(**changed: Any) -> Any:
    return read_request(json.dumps({**GOOD, **changed}).encode(), "m", 8)


@pytest.mark.parametrize(("top_k", "room"), [(1, 1 << 18), (128, 1 << 17), (1 << 16, 4096)])
def test_room_is_for_labels_of_any_k(top_k: int, room: int) -> None:
    assert ProxySettings("s", top_k=top_k).room == room
    assert ProxySettings("s", top_k=top_k, max_tokens=7).room == 7
    found = read(prompt=[[1]] * 100 + [[2] * 40])
    assert (found.tokens, found.weight) == (140, 1640), "each has arrays of its own, however short it is"


def test_prompts_and_k() -> None:
    found = read()
    assert [ids.tolist() for ids in found.prompts] == [[1, 2], [3]]
    assert (found.k, found.tokens, found.prompts[0].dtype) == (2, 3, np.int32)
    assert [ids.tolist() for ids in read(prompt=[7, 8]).prompts] == [[7, 8]]
    assert read(prompt_logprobs=None, logprobs=3).k == 3
    assert read(logprobs=True, prompt_logprobs=4).k == 4
    for name, values in NEUTRAL.items():
        for value in values:
            assert read(**{name: value}).tokens == 3


@pytest.mark.parametrize(
    "changed",
    [
        *({"prompt": wrong} for wrong in ([], [[]], "a", ["a"], [1.0], [True], [[1], 2], None, {}, [-1])),
        *({"prompt": [2**31]}, {"prompt": [10**400]}),
        *({"prompt_logprobs": wrong} for wrong in (9, -1, True, 1.0)),
        {"prompt_logprobs": None},
        *({"max_tokens": wrong} for wrong in (2, -1, True)),
        *({"temperature": wrong} for wrong in (0.5, True, float("nan"))),
        *({"truncate_prompt_tokens": 0}, {"prompt_embeds": "x"}),
        *({"stream": True}, {"n": 2}, {"best_of": 3}),
    ],
)
def test_refusals(changed: dict[str, Any]) -> None:
    with pytest.raises(RequestRefusal) as refused:
        read(**changed)
    assert refused.value.status == 400
    assert refused.value.message.isprintable()


def test_choices_are_vllms() -> None:
    prompt = np.array([4, 7, 9], np.int32)
    ids = np.array([[7, 1], [2, 1], [0, 1]], np.int32)
    values = np.array([[-0.1, -3.0], [-0.5, -np.inf], [-1, -2]], np.float32)
    own = np.array([[-0.1], [-8.25], [0.0]], np.float32)
    choice = json.loads(b"".join(encode_choice(3, prompt, TopK(ids, values, np.zeros(3, np.float32)), own, 2, True)))
    assert choice["index"] == 3
    assert choice["prompt_token_ids"] == [4, 7, 9]
    first, second, third = choice["prompt_logprobs"]
    assert first is None
    assert {token: entry["rank"] for token, entry in second.items()} == {"7": 1, "1": 2}
    assert np.float32(second["7"]["logprob"]) == np.float32(-0.1)
    assert third["9"] == {"logprob": -8.25, "rank": 3, "decoded_token": None}
    assert third["1"]["logprob"] == -9999.0
    for k, count in ((0, 1), (1, 2)):
        cut = json.loads(b"".join(encode_choice(0, prompt, TopK(ids, values, np.zeros(3, np.float32)), own, k, False)))
        assert len(cut["prompt_logprobs"][2]) == count
    whole = json.loads(answer_head("1", 5, 'a"b') + answer_tail(3))
    assert (whole["model"], whole["choices"], whole["usage"]["prompt_tokens"]) == ('a"b', [], 3)


def test_long_choices_come_in_pieces() -> None:
    tokens, k = 3000, 8
    ids = np.argsort(np.random.default_rng(0).random((tokens, 20)), axis=1)[:, :k].astype(np.int32)
    values = -np.sort(np.random.default_rng(1).random((tokens, k)).astype(np.float32), axis=1)
    prompt = np.random.default_rng(2).integers(0, 20, tokens).astype(np.int32)
    labels, own = TopK(ids, values, np.zeros(tokens, np.float32)), np.full((tokens, 1), -9, np.float32)
    pieces = list(encode_choice(0, prompt, labels, own, k, True))
    assert len(pieces) > 5
    assert max(map(len, pieces)) < 512 << 10
    choice = json.loads(b"".join(pieces))
    assert choice["prompt_token_ids"] == prompt.tolist()
    assert len(choice["prompt_logprobs"]) == tokens
    for place in (1, 455, 456, 457, tokens - 1):
        entries = choice["prompt_logprobs"][place]
        assert list(entries)[:k] == [str(token) for token in ids[place - 1]], place
        assert str(prompt[place]) in entries, place


def test_room_is_given_in_turn() -> None:
    async def run() -> list[int]:
        gate = TokenGate(10)
        order: list[int] = []

        async def come(number: int, tokens: int) -> None:
            async with gate.room(tokens, DEADLINE_S):
                order.append(number)
                assert gate.inside <= 10
                for _ in range(10):
                    await asyncio.sleep(0)

        tasks = [asyncio.ensure_future(come(number, tokens)) for number, tokens in enumerate((8, 8, 1, 10, 2))]
        await asyncio.sleep(0)
        tasks[2].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert (gate.inside, gate.waiting) == (0, 0)
        async with gate.room(10, DEADLINE_S):
            with pytest.raises(RequestRefusal, match="no room"):
                async with gate.room(1, 0.01):
                    pass
            assert (gate.inside, gate.waiting) == (10, 0)
        with pytest.raises(RequestRefusal, match="11 tokens"):
            async with gate.room(11, DEADLINE_S):
                pass
        return order

    assert asyncio.run(run()) == [0, 1, 3, 4]
