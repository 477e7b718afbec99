"""What a model's configuration says, read without trust: a server may answer anything."""

from __future__ import annotations

from typing import NamedTuple

from edl.protocol import kserve, names

__all__ = ["LONGEST_NAME", "MOST_DIGITS", "LanguageModelConfig", "config_number", "count_instances"]

LONGEST_NAME = 512  # of a model, tensor or version; longer ones are no names
MOST_DIGITS = 18  # of a number in text: what 64 bits hold; of thousands of digits Python makes an error


class LanguageModelConfig(NamedTuple):
    """What a model's configuration says of its rows as tokens; see `ModelSpec`."""

    sequences: str = ""
    max_top_k: int = 0
    max_sequence: int = 0
    tokenizer: str = ""
    optional_inputs: tuple[str, ...] = ()
    weights_version: str = ""

    @classmethod
    def of(cls, config: kserve.ModelConfig) -> LanguageModelConfig:
        """Read it from a model's configuration."""
        return cls(
            _config_text(config, names.SEQUENCES),
            config_number(config, names.MAX_TOP_K),
            config_number(config, names.MAX_SEQUENCE),
            _config_text(config, names.TOKENIZER),
            tuple(_config_text(config, names.OPTIONAL_INPUTS).split(",")),
            _config_text(config, names.WEIGHTS_VERSION),
        )


def config_number(config: kserve.ModelConfig, name: str) -> int:
    """Return a parameter of a model's configuration, 0 if it is none or no number."""
    text = config.parameters[name].string_value
    return int(text) if text.isdecimal() and len(text) <= MOST_DIGITS else 0


def _config_text(config: kserve.ModelConfig, name: str) -> str:
    """Return a parameter of a model's configuration, empty if it is none or no name."""
    text = str(config.parameters[name].string_value)
    return text if len(text) <= LONGEST_NAME and text.isprintable() else ""


def count_instances(config: kserve.ModelConfig) -> int:
    """Return how many instances a model has, 0 if its configuration does not tell."""
    return sum(max(group.count, 0) * max(len(group.gpus), 1) for group in config.instance_group)
