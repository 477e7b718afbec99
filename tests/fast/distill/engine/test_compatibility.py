"""What the answers of one service's teachers must have in common, and what may differ."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from edl.discovery.registry import Instance
from edl.distill.compress import top_k
from edl.distill.engine.compatibility import TeacherCompatibility, outputs_disagreement
from edl.distill.transport.schema import ModelSpec, OutputSpec, TensorMetadata
from edl.errors import SettingsError


def spec(*shape: int, inputs: tuple[int, ...] = (-1,)) -> ModelSpec:
    return ModelSpec("m", "1", {"x": TensorMetadata("x", "FP32", inputs)}, {"y": TensorMetadata("y", "FP32", shape)})


def agree(known: ModelSpec | None, k: int | None = None) -> TeacherCompatibility:
    compatibility = TeacherCompatibility("s", OutputSpec(("y",), top_k=k))
    compatibility.spec = known
    return compatibility


def words(
    compatibility: TeacherCompatibility, *shape: int, dtype: str = "float32", inputs: tuple[int, ...] = (4, 5)
) -> str:
    failure = compatibility.check_output("t", [("x", "FP32", inputs)], {"y": np.zeros((4, *shape), dtype)})
    return failure.message if failure is not None else ""


def test_only_fixed_metadata_must_agree() -> None:
    compatibility = agree(spec(-1, 997))
    assert [words(compatibility, length, 997) for length in (5, 7, 1, 5)] == [""] * 4
    assert "rows of shape [5, 998], the teachers before it [-1, 997]" in words(compatibility, 5, 998)
    assert "1 dimensions, the teachers before it of float32 with 2" in words(compatibility, 997)
    assert "rows of float16 with 2" in words(compatibility, 5, 997, dtype="float16")


def test_input_shape_fixes_output_shape() -> None:
    """Without metadata, inputs of one shape give outputs of one shape."""
    compatibility = agree(ModelSpec("m", "1", {}, {}))
    assert words(compatibility, 5, 8, inputs=(4, 5)) == ""
    assert words(compatibility, 7, 8, inputs=(4, 7)) == ""
    assert words(compatibility, 5, 8, inputs=(9, 5)) == ""
    assert "rows of shape [5, 9], the teachers before it [5, 8]" in words(compatibility, 5, 9, inputs=(4, 5))


def test_top_k_has_k_classes() -> None:
    inputs = [("x", "FP32", (2, 5))]
    for known, good, bad in (((-1, 9), (5, 9), None), ((3, 9), (3, 9), (4, 9)), ((-1, 2), (5, 2), None)):
        compatibility = agree(spec(*known), k=3)
        assert (
            compatibility.check_output("t", inputs, {"y": top_k(np.zeros((2, *good), "f4"), min(3, good[-1]))}) is None
        )
        if bad is not None:
            assert compatibility.check_output("t", inputs, {"y": top_k(np.zeros((2, *bad), "f4"), 3)}) is not None
    compatibility = agree(spec(9), k=3)
    assert compatibility.check_output("t", inputs, {"y": top_k(np.zeros((2, 9), "f4"), 2)}) is not None


def test_other_fixed_sizes_are_not_connected() -> None:
    """A teacher whose metadata fixes other sizes is not connected."""
    compatibility, instance = agree(spec(-1, 997)), Instance("s", "t", "127.0.0.1", 1)
    assert compatibility.incompatibility(instance, spec(-1, 997)) == ""
    assert compatibility.incompatibility(instance, spec(5, 997)) == ""
    assert "'y' with rows of shape [-1, 10], the teachers before it [-1, 997]" in compatibility.incompatibility(
        instance, spec(-1, 10)
    )
    assert "rows of shape [997]" in compatibility.incompatibility(instance, spec(997))


# Versions


def specs(*versions: str) -> list[ModelSpec]:
    return [ModelSpec("m", version, {}, {}) for version in versions]


@pytest.mark.parametrize(
    ("live", "version"),
    [
        ([], "1"),
        (["1"], "1"),
        (["2"], "2"),
        (["2", "2", "1"], "1"),  # it stays while somebody has it
        (["3", "2", "2"], "2"),  # else that of the most
        (["3", "2"], "2"),  # of as many, the same compatibility for every student
        (["2", "3"], "2"),
    ],
)
def test_version_follows_the_live_teachers(live: list[str], version: str) -> None:
    compatibility = TeacherCompatibility("s", OutputSpec(("y",)))
    (compatibility.spec,) = specs("1")
    compatibility.select_version(specs(*live))
    assert compatibility.spec is not None
    assert compatibility.spec.version == version


def test_a_mixture_is_refused_where_told_to() -> None:
    compatibility = TeacherCompatibility("s", OutputSpec(("y",)), "refuse")
    (compatibility.spec,) = specs("1")
    other = Instance("b", "s", "10.0.0.1", 1)
    assert compatibility.check_version("t", "1") is None
    assert "version '2'" in compatibility.incompatibility(other, specs("2")[0])
    failure = compatibility.check_version("t", "2")
    assert failure is not None
    assert "labels are of '1'" in failure.message
    assert compatibility.check_version("t", "") is not None, "an answer that does not say may be of any"
    compatibility.selecting_version = True
    assert compatibility.incompatibility(other, specs("2")[0]) == "", "between two epochs all versions are looked at"
    compatibility.selecting_version = False
    compatibility.select_version(specs("2"))
    assert compatibility.check_version("t", "2") is None
    assert compatibility.refuses_version("1")


@pytest.mark.parametrize("selecting_version", [False, True])
def test_unknown_versions_are_not_equal(selecting_version: bool) -> None:
    instance = Instance("b", "s", "10.0.0.1", 1)
    (unknown,) = specs("")
    for known in (None, unknown, *specs("1")):
        compatibility = TeacherCompatibility("s", OutputSpec(("y",)), "refuse")
        compatibility.spec = known
        compatibility.selecting_version = selecting_version
        assert "--model-version" in compatibility.incompatibility(instance, unknown)
        if known is not None:
            failure = compatibility.check_version("t", "")
            assert failure is not None
            assert "--model-version" in failure.message
    lenient = TeacherCompatibility("s", OutputSpec(("y",)))
    assert lenient.incompatibility(instance, unknown) == ""
    lenient.spec = unknown
    assert lenient.incompatibility(instance, unknown) == ""
    assert lenient.check_version("t", "") is None


@pytest.mark.parametrize("mixed_versions", ["warn", "refuse"])
def test_another_models_name_is_refused(mixed_versions: Any) -> None:
    compatibility = TeacherCompatibility("s", OutputSpec(("y",)), mixed_versions)
    (compatibility.spec,) = specs("1")
    other = Instance("b", "s", "10.0.0.1", 1)
    dogs = [replace(spec, name="dogs") for spec in specs("1", "1", "2")]
    for selecting_version in (False, True):
        compatibility.selecting_version = selecting_version
        for dog in dogs:
            words = compatibility.incompatibility(other, dog)
            assert "it serves model 'dogs'" in words, (
                "two models are no versions of compatibility, between two epochs as well"
            )
            assert "'m'" in words
            assert "model=" in words, "the remedy is named"
    compatibility.select_version(dogs)
    assert (compatibility.spec.name, compatibility.spec.version) == ("m", "1"), (
        "labels would be kept under another name"
    )
    compatibility.select_version([*dogs, *specs("2")])
    assert (compatibility.spec.name, compatibility.spec.version) == ("m", "2")


@pytest.mark.parametrize(
    ("k", "words"), [(8, ""), (64, ""), (65, "top_k=65 is asked for"), (None, "whole outputs are asked for")]
)
def test_top_k_is_within_the_teachers(k: int | None, words: str) -> None:
    """A teacher that sends the 64 largest log-probabilities at most is refused by name where more is asked for."""
    known = replace(spec(9), outputs={"logprobs": TensorMetadata("logprobs", "FP32", (32000,))}, max_top_k=64)
    compatibility = TeacherCompatibility("s", OutputSpec(("logprobs",), top_k=k))
    why = compatibility.incompatibility(Instance("s", "t", "127.0.0.1", 1), known)
    assert (words in why) if words else not why
    assert not why or "set top_k=64 or less" in why


@pytest.mark.parametrize(
    ("wanted", "says", "meta", "words"),
    [
        ("", "", "", ""),
        ("", "aa", "bb", ""),
        ("aa", "aa", "", ""),
        ("aa", "", "aa", ""),
        ("aa", "bb", "", "has tokenizer 'bb', and the student's is 'aa'"),
        ("aa", "", "bb", "has tokenizer 'bb', and the student's is 'aa'"),
        ("aa", "", "", "does not say which tokenizer it has"),
    ],
)
def test_another_tokenizer_is_refused(wanted: str, says: str, meta: str, words: str) -> None:
    """What a teacher's configuration says, or else its instance in discovery, must be the student's."""
    compatibility = TeacherCompatibility("s", OutputSpec(("y",), tokenizer=wanted))
    instance = Instance("s", "t", "127.0.0.1", 1, meta={"tokenizer": meta} if meta else {})
    why = compatibility.incompatibility(instance, replace(spec(9), tokenizer=says))
    assert (words in why) if words else not why


def test_rows_are_tokens_of_all_or_none() -> None:
    """Requests are filled as the first teacher's model says: another would cut sequences, or take rows for some."""
    of_tokens, of_rows = replace(spec(9), sequences="position"), spec(9)
    instance = Instance("b", "s", "10.0.0.1", 1)
    assert agree(of_tokens).incompatibility(instance, of_tokens) == agree(of_rows).incompatibility(instance, of_rows)
    words = agree(of_tokens).incompatibility(instance, of_rows)
    assert "has independent rows, the teachers before it rows that belong to sequences by input 'position'" in words
    assert "by input 'position', the teachers before it independent" in agree(of_rows).incompatibility(
        instance, of_tokens
    )


def test_kept_labels_may_fix_the_input_shape() -> None:
    """Kept labels need inputs of one shape only where labels follow them."""
    short, long = {"x": np.zeros((2, 5), "f4")}, {"x": np.zeros((2, 8), "f4")}
    for known, k in ((spec(9), None), (spec(-1), 3), (ModelSpec("m", "1", {}, {}), None)):
        for inputs in (short, long):
            agree(known, k).check_cacheable(inputs)
    compatibility = agree(spec(-1, 9))
    compatibility.check_cacheable(short)
    compatibility.check_cacheable({**short, "not sent": np.zeros((2, 1))})
    with pytest.raises(SettingsError, match=r"'y' \[-1, 9\]"):
        compatibility.check_cacheable(long)


def test_two_tokenizers_are_never_mixed() -> None:
    """Nor among the services of a reader with routes. A teacher that tells none is believed, also the first."""
    one, other = replace(spec(9), tokenizer="aa"), replace(spec(9), tokenizer="bb")
    assert "tokenizer 'bb', model 'm' 'aa'" in outputs_disagreement(one, other, OutputSpec(("y",)))
    assert not outputs_disagreement(one, spec(9), OutputSpec(("y",)))
    for in_metadata in (False, True):

        def why(compatibility: TeacherCompatibility, tokenizer: str, in_metadata: bool = in_metadata) -> str:
            meta = {"tokenizer": tokenizer} if in_metadata else {}
            says = replace(spec(9), tokenizer="" if in_metadata else tokenizer)
            return compatibility.incompatibility(Instance("s", "t", "127.0.0.1", 1, meta=meta), says)

        compatibility = agree(None)
        assert not why(compatibility, "")
        compatibility.spec = spec(9)
        assert not why(compatibility, "aa")
        assert "'bb', the teachers before it 'aa'" in why(compatibility, "bb")
        assert not why(compatibility, "")
