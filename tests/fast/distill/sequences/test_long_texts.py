"""Texts that only some teachers take wait for those, whichever teacher comes first; and a scorer follows versions."""

from __future__ import annotations

import socket
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edl.distill import DistillReader, Options, Scorer
from edl.errors import NoTeacherError, SourceError
from edl.testing import LocalTeacher
from tests.fast.distill.conftest import until
from tests.fast.distill.reading import words_of_failure
from tests.fast.distill.sequences.language_model import PrefixModel, check_labels
from tests.fast.serving.conftest import Inside
from tests.plugins_consul import free_ports

LONG = np.arange(300, dtype=np.int32) % 31
SHORT = np.arange(20, dtype=np.int32)


def later(port: int, started: list[Any]) -> threading.Timer:
    """Start a teacher that takes long texts, when the other has long been there."""

    def start() -> None:
        started.append(LocalTeacher("prefix_scores", vocabulary=31, port=port, max_batch=512))

    timer = threading.Timer(1.0, start)
    timer.start()
    return timer


@pytest.mark.parametrize("scored", [False, True])
def test_long_text_waits_for_its_teacher(scored: bool) -> None:
    """The teacher that takes it is listed, and is not there yet; a scorer answers other calls meanwhile."""
    port = free_ports(1)[0]
    started: list[LocalTeacher] = []
    with LocalTeacher("prefix_scores", vocabulary=31, max_batch=128) as small:
        teachers = [small.endpoint, f"127.0.0.1:{port}"]
        timer = later(port, started)
        try:
            if scored:
                with Scorer(teachers, top_k=4) as scorer:
                    first, second = scorer.score([LONG]), scorer.score([SHORT])
                    check_labels(SHORT, second.result(60)[0], 4)
                    check_labels(LONG, first.result(60)[0], 4)
                return
            reader = DistillReader(["ids"], ["logprobs"], teachers=teachers, top_k=4)
            with reader.set_sequence_generator(lambda: iter([(SHORT,), (LONG,)])):
                for ids, labels in reader():
                    check_labels(ids, labels, 4)
        finally:
            timer.join()
            for teacher in started:
                teacher.close()


def test_text_that_is_too_long_for_all() -> None:
    """Where all teachers are known it is an error at once, however long teachers may be away."""
    small, smaller = Inside(PrefixModel(max_sequence=100)), Inside(PrefixModel(max_sequence=50))
    try:
        options = Options(teacher_timeout_s=600)
        reader = DistillReader(["ids"], ["logprobs"], teachers=[small.target, smaller.target], top_k=4, options=options)
        source = iter([(SHORT,), (LONG,)])
        with reader.set_sequence_generator(lambda: source), pytest.raises(SourceError, match=r"300 tokens, .* at most"):
            list(reader())
    finally:
        small.close()
        smaller.close()


def test_service_may_get_a_larger_teacher(tmp_path: Path) -> None:
    """Of a service whose teachers come and go a larger one may come at any moment; the wait ends with an error."""
    discovery = f"sqlite:///{tmp_path}/discovery.sqlite"
    named: Any = {"service": "lm", "discovery": discovery}
    with LocalTeacher("prefix_scores", vocabulary=31, max_batch=128, **named):

        def make(timeout_s: float) -> DistillReader:
            made = DistillReader(["ids"], ["logprobs"], top_k=4, options=Options(teacher_timeout_s=timeout_s))
            return made.set_dynamic_teacher(discovery, "lm").set_sequence_generator(lambda: iter([(LONG,)]))

        words = "300 tokens, and teachers take at most 128"
        assert words in words_of_failure(words, make)
        reader = DistillReader(["ids"], ["logprobs"], top_k=4)
        reader.set_dynamic_teacher(discovery, "lm").set_sequence_generator(lambda: iter([(LONG,)]))
        started: list[LocalTeacher] = []
        timer = threading.Timer(
            1.0, lambda: started.append(LocalTeacher("prefix_scores", vocabulary=31, max_batch=512, **named))
        )
        timer.start()
        try:
            with reader:
                ((ids, labels),) = list(reader())
            check_labels(ids, labels, 4)
        finally:
            timer.join()
            for teacher in started:
                teacher.close()


def test_words_when_the_long_one_is_lost() -> None:
    """A text that the teachers left do not take: the words are of its tokens, and not of bytes."""
    small = Inside(PrefixModel(max_sequence=100))
    large = LocalTeacher("prefix_scores", vocabulary=31, max_batch=512)
    try:
        reader = DistillReader(
            ["ids"],
            ["logprobs"],
            teachers=[large.endpoint, small.target],
            top_k=4,
            options=Options(teacher_timeout_s=3),
        )

        def source() -> Any:
            yield (SHORT,)
            until(lambda: reader.stats().teachers_live == 2, 60)
            yield (LONG,)
            large.kill()
            yield (LONG,)

        with reader.set_sequence_generator(source), pytest.raises(NoTeacherError, match="a sequence of 300 tokens"):
            list(reader())
    finally:
        large.close()
        small.close()


@pytest.mark.parametrize("mixed", ["refuse", "warn"])
def test_scorer_follows_a_new_version(mixed: Any) -> None:
    """On-policy loops change weights: calls after a restart are of the new version, and none waits in vain."""
    port = free_ports(1)[0]
    options = Options(mixed_versions=mixed, teacher_timeout_s=60)
    with Scorer(f"127.0.0.1:{port}", top_k=4, options=options) as scorer:
        for version in ("1", "2", "3"):
            with LocalTeacher("prefix_scores", vocabulary=31, port=port, version=version):
                for _ in range(2):
                    check_labels(SHORT, scorer.score([SHORT]).result(120)[0], 4)


@pytest.mark.parametrize("kind", ["sequence", "sequence_list", "routed", "routed_list", "padded", "routed_padded"])
def test_what_comes_before_is_delivered(kind: str) -> None:
    """A text that waits for a larger teacher holds up no text that came before it, nor the end of the reader."""
    texts = [SHORT[:3], SHORT[:2], LONG[:40]]
    with closing(socket.socket()) as unused, closing(Inside(PrefixModel(max_sequence=8), max_batch_rows=512)) as small:
        unused.bind(("127.0.0.1", 0))  # nobody listens: it is being connected to for as long as this takes
        teachers: Any = [small.target, f"127.0.0.1:{unused.getsockname()[1]}"]
        settings: dict[str, Any] = {"top_k": 4, "options": Options(teacher_timeout_s=60)}
        if kind.startswith("routed"):
            settings |= {"route": 1}
            teachers = {"long": teachers, "short": small.target}
        domains = ["short", "long", "long"]
        if kind.endswith("padded"):
            pytest.importorskip("torch")
            from edl.distill.torch import distill

            batches = [
                (text[None], [domain], np.ones((1, len(text)))) for text, domain in zip(texts, domains, strict=True)
            ]
            labelled: Any = distill(batches, teachers, inputs={"ids": 0}, outputs="logprobs", tokens=2, **settings)
            epoch = ((batch[0][0], labels.map(lambda part: part[0].numpy())) for batch, labels in labelled)
        else:
            labelled = DistillReader(["ids", None], ["logprobs"], teachers=teachers, **settings)
            samples = list(zip(texts, domains, strict=True))
            if kind.endswith("list"):
                labelled.set_sequence_list_generator(lambda: ([sample] for sample in samples))
                epoch = ((ids, labels) for ((ids, _, labels),) in labelled())
            else:
                labelled.set_sequence_generator(lambda: iter(samples))
                epoch = ((ids, labels) for ids, _, labels in labelled())
        with labelled:
            for text in texts[:2]:
                ids, labels = next(epoch)
                assert ids.tolist() == text.tolist()
                check_labels(ids, labels, 4)
