"""What the answers of one service's teachers must have in common, and what may differ."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from edl.discovery.registry import Instance
from edl.distill.compress import top_k
from edl.distill.engine.compatibility import TeacherCompatibility, outputs_disagreement
from edl.distill.transport.schema import ModelSpec, OutputSpec, TensorMetadata
from edl.errors import SettingsError

INSTANCE = Instance("s", "t", "127.0.0.1", 1)


def spec(*shape: int, inputs: tuple[int, ...] = (-1,)) -> ModelSpec:
    return ModelSpec("m", "1", {"x": TensorMetadata("x", "FP32", inputs)}, {"y": TensorMetadata("y", "FP32", shape)})


def version(name: str, model: str = "m") -> ModelSpec:
    return ModelSpec(model, name, {}, {})


def agree(known: ModelSpec | None, k: int | None = None, mixed: Any = "warn", **asked: Any) -> TeacherCompatibility:
    compatibility = TeacherCompatibility("s", OutputSpec(("y",), top_k=k, **asked), mixed)
    compatibility.spec = known
    return compatibility


def words(
    compatibility: TeacherCompatibility, *shape: int, dtype: str = "float32", inputs: tuple[int, ...] = (4, 5)
) -> str:
    failure = compatibility.check_output("t", [("x", "FP32", inputs)], {"y": np.zeros((4, *shape), dtype)})
    return failure.message if failure is not None else ""


def version_words(compatibility: TeacherCompatibility, version: str) -> str:
    failure = compatibility.check_version("t", version)
    return failure.message if failure is not None else ""


def test_only_fixed_metadata_must_agree() -> None:
    compatibility = agree(spec(-1, 997))
    assert [words(compatibility, length, 997) for length in (5, 7, 1, 5)] == [""] * 4
    assert "rows of shape [5, 998], the teachers before it [-1, 997]" in words(compatibility, 5, 998)
    assert "1 dimensions, the teachers before it of float32 with 2" in words(compatibility, 997)
    assert "rows of float16 with 2" in words(compatibility, 5, 997, dtype="float16")


def test_input_shape_fixes_output_shape() -> None:
    """Without metadata, inputs of one shape give outputs of one shape."""
    compatibility = agree(version("1"))
    assert words(compatibility, 5, 8, inputs=(4, 5)) == ""
    assert words(compatibility, 7, 8, inputs=(4, 7)) == ""
    assert words(compatibility, 5, 8, inputs=(9, 5)) == ""
    assert "rows of shape [5, 9], the teachers before it [5, 8]" in words(compatibility, 5, 9, inputs=(4, 5))


def test_top_k_has_k_classes() -> None:
    def fits(known: tuple[int, ...], shape: tuple[int, ...], k: int = 3) -> bool:
        outputs: dict[str, Any] = {"y": top_k(np.zeros((2, *shape), "f4"), k)}
        return agree(spec(*known), k=3).check_output("t", [("x", "FP32", (2, 5))], outputs) is None

    assert fits((-1, 9), (5, 9))
    assert fits((3, 9), (3, 9))
    assert not fits((3, 9), (4, 9))
    assert fits((-1, 2), (5, 2), k=2)
    assert not fits((9,), (9,), k=2)


def test_other_fixed_sizes_are_not_connected() -> None:
    compatibility = agree(spec(-1, 997))
    for shape in ((-1, 997), (5, 997)):
        assert compatibility.incompatibility(INSTANCE, spec(*shape)) == ""
    words = compatibility.incompatibility(INSTANCE, spec(-1, 10))
    assert "'y' with rows of shape [-1, 10], the teachers before it [-1, 997]" in words
    assert "rows of shape [997]" in compatibility.incompatibility(INSTANCE, spec(997))


# Versions


@pytest.mark.parametrize(
    ("live", "expected"), [("", "1"), ("2", "2"), ("221", "1"), ("322", "2"), ("32", "2"), ("23", "2")]
)
def test_version_follows_the_live_teachers(live: str, expected: str) -> None:
    """It stays while somebody has it; else it is that of the most, and of as many the same one for every student."""
    compatibility = agree(version("1"))
    compatibility.select_version([version(name) for name in live])
    assert compatibility.spec == version(expected)


def test_a_mixture_is_refused_where_told_to() -> None:
    compatibility = agree(version("1"), mixed="refuse")
    assert version_words(compatibility, "1") == ""
    assert "version '2'" in compatibility.incompatibility(INSTANCE, version("2"))
    assert "labels are of '1'" in version_words(compatibility, "2")
    assert version_words(compatibility, ""), "an answer that does not say may be of any"
    compatibility.selecting_version = True
    assert compatibility.incompatibility(INSTANCE, version("2")) == "", "between two epochs all are looked at"
    compatibility.selecting_version = False
    compatibility.select_version([version("2")])
    assert version_words(compatibility, "2") == ""
    assert compatibility.refuses_version("1")


@pytest.mark.parametrize("selecting_version", [False, True])
def test_unknown_versions_are_not_equal(selecting_version: bool) -> None:
    for known in (None, version(""), version("1")):
        compatibility = agree(known, mixed="refuse")
        compatibility.selecting_version = selecting_version
        assert "--model-version" in compatibility.incompatibility(INSTANCE, version(""))
        assert known is None or "--model-version" in version_words(compatibility, "")
    for known in (None, version("")):
        lenient = agree(known)
        assert lenient.incompatibility(INSTANCE, version("")) == ""
        assert version_words(lenient, "") == ""


@pytest.mark.parametrize("mixed", ["warn", "refuse"])
def test_another_models_name_is_refused(mixed: str) -> None:
    compatibility = agree(version("1"), mixed=mixed)
    dogs = [version("1", "dogs"), version("1", "dogs"), version("2", "dogs")]
    for selecting_version in (False, True):
        compatibility.selecting_version = selecting_version
        for dog in dogs:
            words = compatibility.incompatibility(INSTANCE, dog)
            assert "it serves model 'dogs'" in words, "two models are no versions, between two epochs as well"
            assert "model=" in words, "the remedy is named"
    compatibility.select_version(dogs)
    assert compatibility.spec == version("1"), "labels would be kept under another name"
    compatibility.select_version([*dogs, version("2")])
    assert compatibility.spec == version("2")


# What a student asks for


@pytest.mark.parametrize(
    ("k", "words"), [(8, ""), (64, ""), (65, "top_k=65 is asked for"), (None, "whole outputs are asked for")]
)
def test_top_k_is_within_the_teachers(k: int | None, words: str) -> None:
    """A teacher that sends the 64 largest log-probabilities at most is refused by name where more is asked for."""
    known = replace(spec(9), outputs={"logprobs": TensorMetadata("logprobs", "FP32", (32000,))}, max_top_k=64)
    compatibility = TeacherCompatibility("s", OutputSpec(("logprobs",), top_k=k))
    why = compatibility.incompatibility(INSTANCE, known)
    assert (words in why) if words else not why
    assert not why or "set top_k=64 or less" in why


def tokenizer_words(compatibility: TeacherCompatibility, says: str = "", registered: str = "") -> str:
    """Why a teacher is not used whose configuration, or whose registration, tells this tokenizer."""
    meta = {"tokenizer": registered} if registered else {}
    return compatibility.incompatibility(replace(INSTANCE, meta=meta), replace(spec(9), tokenizer=says))


def test_another_tokenizer_is_refused() -> None:
    """What a teacher's configuration says, or else its instance in discovery, must be the student's."""
    student = partial(tokenizer_words, agree(None, tokenizer="aa"))
    assert not student("aa")
    assert not student("", "aa")
    assert "has tokenizer 'bb', and the student's is 'aa'" in student("bb", "aa")
    assert "has tokenizer 'bb', and the student's is 'aa'" in student("", "bb")
    assert "does not say which tokenizer it has" in student()


def test_two_tokenizers_are_never_mixed() -> None:
    """Nor among the services of a reader with routes. A teacher that tells none is believed, also the first."""
    one, other = replace(spec(9), tokenizer="aa"), replace(spec(9), tokenizer="bb")
    assert "tokenizer 'bb', model 'm' 'aa'" in outputs_disagreement(one, other, OutputSpec(("y",)))
    assert not outputs_disagreement(one, spec(9), OutputSpec(("y",)))
    for told in ("says", "registered"):
        compatibility = agree(None)
        assert not tokenizer_words(compatibility)
        compatibility.spec = spec(9)
        assert not tokenizer_words(compatibility, **{told: "aa"})
        assert "'bb', the teachers before it 'aa'" in tokenizer_words(compatibility, **{told: "bb"})
        assert not tokenizer_words(compatibility)


def test_rows_are_tokens_of_all_or_none() -> None:
    """Requests are filled as the first teacher's model says: another would cut sequences, or take rows for some."""
    of_tokens, of_rows = replace(spec(9), sequences="position"), spec(9)
    assert agree(of_tokens).incompatibility(INSTANCE, of_tokens) == agree(of_rows).incompatibility(INSTANCE, of_rows)
    words = agree(of_tokens).incompatibility(INSTANCE, of_rows)
    assert "has independent rows, the teachers before it rows that belong to sequences by input 'position'" in words
    words = agree(of_rows).incompatibility(INSTANCE, of_tokens)
    assert "by input 'position', the teachers before it independent" in words


def test_kept_labels_may_fix_the_input_shape() -> None:
    """Kept labels need inputs of one shape only where labels follow them."""
    short, long = {"x": np.zeros((2, 5), "f4")}, {"x": np.zeros((2, 8), "f4")}
    for known, k in ((spec(9), None), (spec(-1), 3), (version("1"), None)):
        for inputs in (short, long):
            agree(known, k).check_cacheable(inputs)
    compatibility = agree(spec(-1, 9))
    compatibility.check_cacheable(short)
    compatibility.check_cacheable({**short, "not sent": np.zeros((2, 1))})
    with pytest.raises(SettingsError, match=r"'y' \[-1, 9\]"):
        compatibility.check_cacheable(long)
