"""Opens a proxy's scorers: one for each combination of service, number of entries and temperature in requests.

A `Scorer` requests a fixed `k` at a fixed temperature. A request for 8 entries therefore stays small even on a proxy
that allows 128 entries, and any teacher with `--top-k 8` or more can answer the request. Each service has one scorer
from the start; this scorer also reports the live teachers.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Any, Final, NamedTuple, TypeVar

from prometheus_client import CollectorRegistry
from prometheus_client.registry import Collector

from edl.distill import Options, Scorer
from edl.distill.metrics import export
from edl.distill.options import Policy
from edl.proxy.completions import RequestRefusal
from edl.proxy.settings import ProxySettings

_MOST_OPEN: Final = 16  # each connects to all teachers of its service; a trainer uses one or two numbers of entries
_RETRY_S: Final = 1.0
_POLICY: Final = Policy(aside_s=0.1, failures_to_open=10, open_max_s=2.0)
"""A failed request goes to another teacher, and is abandoned after three failures. Failures of one client's requests
must not make the teacher unavailable to other clients, whose prompts the teacher may be able to answer."""

_T = TypeVar("_T")


class ScorerKey(NamedTuple):
    """What a scorer requests from its teachers."""

    model: str
    k: int = 1
    temperature: float = 1.0


class ScorerPool:
    """Opens scorers on demand, and closes the least recently used ones. Used on a single event loop."""

    def __init__(self, settings: ProxySettings) -> None:
        self.registry = CollectorRegistry()
        self._settings = settings
        self._open: dict[ScorerKey, tuple[Scorer, Collector]] = {}  # the least recently used first
        self._users: Counter[ScorerKey] = Counter()
        self._changing = asyncio.Lock()
        try:
            for model in settings.services:
                self._make(ScorerKey(model))
        except BaseException:
            self.close()
            raise

    def first(self, model: str) -> Scorer:
        """Return the scorer that the service of a model has from the start."""
        return self._open[ScorerKey(model)][0]

    @contextlib.asynccontextmanager
    async def use(self, key: ScorerKey) -> AsyncIterator[Scorer]:
        """Hold a scorer for the block; raise `RequestRefusal` 503 if the maximum number of scorers is in use."""
        async with self._changing:
            if key not in self._open:
                if len(self._open) >= _MOST_OPEN + len(self._settings.services):
                    await in_thread(self._close_one, self._find_unused())
                await in_thread(self._make, key)
            self._open[key] = self._open.pop(key)
            self._users[key] += 1
        try:
            yield self._open[key][0]
        finally:
            self._users[key] -= 1

    def close(self) -> None:
        """Close all scorers. May be called twice."""
        for key in list(self._open):
            self._close_one(key)

    def _find_unused(self) -> ScorerKey:
        for key in self._open:
            if not self._users[key] and key != ScorerKey(key.model):
                return key
        words = f"{_MOST_OPEN} combinations of model, prompt_logprobs and temperature are in use: use fewer"
        raise RequestRefusal(503, words, _RETRY_S)

    def _make(self, key: ScorerKey) -> None:
        settings = self._settings
        scorer = Scorer(
            settings.services[key.model],
            top_k=key.k,
            targets=True,
            temperature=key.temperature,
            version=settings.version,
            tokenizer=settings.tokenizer,
            discovery=settings.discovery,
            max_tokens=settings.room,
            options=Options(
                teacher_timeout_s=settings.teacher_timeout_s,
                credentials=settings.teacher_credentials,
                policy=_POLICY,
            ),
        )
        name = key.model if key == ScorerKey(key.model) else f"{key.model} k={key.k} temperature={key.temperature:g}"
        self._open[key] = scorer, export(scorer, name, self.registry)

    def _close_one(self, key: ScorerKey) -> None:
        scorer, collector = self._open.pop(key)
        self.registry.unregister(collector)
        scorer.close()


async def in_thread(function: Callable[..., _T], *arguments: Any) -> _T:
    """Call a function in a thread; wait for its end even if cancelled, because the thread uses the arguments."""
    call = asyncio.ensure_future(asyncio.to_thread(function, *arguments))
    try:
        return await asyncio.shield(call)
    except asyncio.CancelledError:
        await asyncio.wait([call])
        if not call.cancelled():
            call.exception()  # marks it as retrieved
        raise
