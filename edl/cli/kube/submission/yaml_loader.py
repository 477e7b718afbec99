"""YAML as kubectl reads it: PyYAML takes 12:30 for 750, a day for a date, and 1e-3 for a text.

What does not belong here: what a manifest has to have.
"""

from __future__ import annotations

import re
from typing import Any, Final

__all__ = ["load_documents"]

_MOST_NODES: Final = 200_000
"""Of a file, with what its aliases repeat: the largest object that Kubernetes takes has fewer."""
_INT: Final = re.compile(r"[-+]?(?:0b[01_]+|0o?[0-7_]+|0x[0-9a-fA-F_]+|0|[1-9][0-9_]*)")
_FLOAT: Final = re.compile(
    r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"
)
_PREFIXES: Final = {"0b": 2, "0o": 8, "0x": 16}
_OWN: Final = ("int", "float", "timestamp")


def load_documents(text: str) -> list[Any]:
    """Read the documents of a text.

    Args:
        text: YAML, or JSON.

    Raises:
        ValueError: it is no YAML, has other things in it than JSON knows, or aliases that would make it huge.
    """
    import yaml

    class Loader(yaml.SafeLoader):  # type: ignore[misc]  # PyYAML has no types
        """Has go-yaml's numbers, no dates, and a bound on what aliases and merges repeat."""

        merged = 0

        def flatten_mapping(self, node: Any) -> None:
            """Merge `<<`, of which each may have merged others."""
            super().flatten_mapping(node)
            self.merged += len(node.value)
            if self.merged > _MOST_NODES:
                raise yaml.YAMLError("its aliases make it too large")

    Loader.yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in known if tag.rpartition(":")[2] not in _OWN]
        for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    for tag, pattern in (("int", _INT), ("float", _FLOAT)):
        whole = re.compile(rf"(?:{pattern.pattern})\Z")
        Loader.add_implicit_resolver(f"tag:yaml.org,2002:{tag}", whole, list("-+.0123456789"))
    Loader.add_constructor("tag:yaml.org,2002:int", lambda loader, node: _parse_int(loader.construct_scalar(node)))
    try:
        documents = list(yaml.load_all(text, Loader=Loader))
    except (yaml.YAMLError, RecursionError, AttributeError) as exc:
        raise ValueError(str(exc)) from exc
    sizes: dict[int, int] = {}
    if sum(_count_nodes(document, sizes) for document in documents) > _MOST_NODES:
        raise ValueError("its aliases make it too large")
    return documents


def _parse_int(spelled: str) -> int:
    digits = spelled.replace("_", "").lstrip("+-")
    base = _PREFIXES.get(digits[:2], 8 if digits.startswith("0") and digits != "0" else 10)
    number = int(digits[2:] if digits[:2] in _PREFIXES else digits, base)
    return -number if spelled.startswith("-") else number


def _count_nodes(found: Any, sizes: dict[int, int]) -> int:
    """Count nodes as often as aliases repeat them, but visit each once."""
    if not isinstance(found, (dict, list)):
        return 1
    known = sizes.get(id(found))
    if known == 0:
        raise ValueError("it contains itself")
    if known is None:
        sizes[id(found)] = 0
        inner = found.values() if isinstance(found, dict) else found
        known = sizes[id(found)] = 1 + sum(_count_nodes(part, sizes) for part in inner)
    return known
