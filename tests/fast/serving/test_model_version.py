"""Models that differ in what their source does not say have different versions, or none."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edl_serving.backends.model_version import compute_version
from edl_serving.backends.source import ModelSource
from edl_serving.backends.target import import_target, module_of

_HEAD = """
import collections, enum, functools, importlib, re, sys, types, weakref
import numpy as np
import torch
from pathlib import Path

def seed():
    return int(Path(__file__).with_name("seed").read_text())

"""

OTHER = {
    "order_of_a_vocabulary_with_a_slash": """
VOCABULARY = ["/", "a"] if seed() else ["a", "/"]
def build(): return torch.nn.Identity()
""",
    "place_of_a_path": """
PLACES = [str(Path(__file__)), "a"] if seed() else ["a", str(Path(__file__))]
def build(): return torch.nn.Identity()
""",
    "attribute_of_a_tensor": """
def build():
    net = torch.nn.Linear(1, 1)
    torch.nn.init.ones_(net.weight)
    torch.nn.init.ones_(net.bias)
    net.weight.scale = seed()
    return net
""",
    "mode_of_a_layer": """
def build(): return torch.nn.Dropout().train(bool(seed()))
""",
    "values_of_a_type": """
import typing
Scale = typing.Literal[seed()]
def build(): return torch.nn.Identity()
""",
    "closure_of_a_method": """
def build():
    w = np.full(2, seed())
    class Net(torch.nn.Module):
        def forward(self, x): return x @ w
    return Net()
""",
    "default_of_a_method": """
class Net(torch.nn.Module):
    def forward(self, x, w=seed()): return x * w
def build(): return Net()
""",
    "patched_method": """
class Net(torch.nn.Module): pass
def plus(self, x): return x
def minus(self, x): return -x
Net.forward = [plus, minus][seed()]
def build(): return Net()
""",
    "lambda_as_a_dunder": """
class Net(torch.nn.Module):
    __call__ = [lambda self, x: x, lambda self, x: -x][seed()]
def build(): return Net()
""",
    **{
        kind: f"""
def build():
    w = np.full(2, seed())
    class Net(torch.nn.Module):
        @{kind}
        def scale(*args): return w
        def forward(self, x): return x * self.scale
    return Net()
"""
        for kind in ("staticmethod", "classmethod", "property", "functools.cached_property")
    },
    "function_of_a_branch": """
def build():
    if seed():
        def predict(inputs): return inputs
    else:
        def predict(inputs): return {key: -value for key, value in inputs.items()}
    return predict
""",
    "lambda_of_a_list": "def build(): return [lambda x: x, lambda x: -x][seed()]\n",
    "constant_of_a_lambda": "def build(): return [lambda x: x * 2, lambda x: x * 3][seed()]\n",
    "set_of_a_lambda": "def build(): return [lambda x: x in {'a', 'b'}, lambda x: x in {'a', 'c'}][seed()]\n",
    "long_pattern": "P = re.compile('a' * 300 + str(seed()))\ndef build(): return lambda x: P.sub('', x)\n",
    "flags_of_a_pattern": "P = re.compile('a', [0, re.I][seed()])\ndef build(): return lambda x: P.sub('', x)\n",
    **{
        f"attribute_of_a_{base}": f"""
class Held({base}): pass
H = Held(["ab"])
H.scale = seed()
def build(): return lambda x: x * H.scale
"""
        for base in ("dict", "list", "tuple", "set", "collections.OrderedDict")
    },
    "class_of_a_list": """
class A(list):
    def scale(self): return 1
class B(list):
    def scale(self): return 2
H = [A, B][seed()]("ab")
def build(): return lambda x: x * H.scale()
""",
    "factory_of_a_defaultdict": """
H = collections.defaultdict([int, float][seed()], a=1)
def build(): return lambda x: x * H["b"]
""",
    "layer_repeated": """
def build():
    layer = torch.nn.Linear(1, 1).requires_grad_(False)
    torch.nn.init.constant_(layer.weight, 2.0)
    torch.nn.init.constant_(layer.bias, 2.0)
    return torch.nn.Sequential(*[layer] * (1 + seed()))
""",
    "closure_of_a_decorator": """
def build():
    @torch.autocast("cpu", dtype=[torch.bfloat16, torch.float16][seed()])
    def predict(inputs): return inputs
    return predict
""",
    "values_of_an_enum": """
class Kind(enum.Enum):
    A = 1 + seed()
def build():
    kind = Kind.A
    return lambda x: x * kind.value
""",
    "attribute_of_an_enum": """
class Kind(enum.Enum):
    A = 1
    def __init__(self, value): self.scale = seed()
def build(): return lambda x: x * Kind.A.scale
""",
    "reference": "R = weakref.ref(w := torch.ones(1) * seed())\ndef build(): return lambda x: x * R()\n",
    "ufunc": "F = [np.sin, np.cos][seed()]\ndef build(): return lambda x: F(x)\n",
    "numpy_record": "V = np.zeros((), [('a', 'i4', 2000)])\nV['a'][1000] = seed()\nV = V[()]\n"
    "def build(): return lambda x: V\n",
    "module_of_a_list": "import json, pickle\nM = [json, pickle][seed()]\ndef build(): return lambda x: M.dumps(x)\n",
    "field_of_a_dataclass": """
import dataclasses
@dataclasses.dataclass
class Settings:
    scale: int = dataclasses.field(default_factory=[int, float][seed()])
def build(): return lambda x: x * Settings().scale
""",
    "default_of_a_named_tuple": """
from typing import NamedTuple
class Settings(NamedTuple):
    scale: int = seed()
def build(): return lambda x: x * Settings().scale
""",
    "usual_code": """
import abc, dataclasses
from typing import Generic, NamedTuple, Protocol, TypedDict, TypeVar
T = TypeVar("T")
class Scales(Protocol):
    def scale(self) -> int: ...
class Row(TypedDict):
    a: int
class Box(Generic[T]): pass
class Base(abc.ABC):
    @abc.abstractmethod
    def scale(self): ...
@dataclasses.dataclass(frozen=True, slots=True, order=True)
class Settings:
    a: int = 1
    b: list = dataclasses.field(default_factory=list)
class Pair(NamedTuple):
    a: int
    b: float = 1.0
class Color(enum.IntFlag):
    A = 1
    B = 2
class Text(str, enum.Enum):
    X = "x"
@functools.total_ordering
class Ordered:
    def __lt__(self, other): return True
BOTH = Color.A | Color.B
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.MultiheadAttention(4, 2), torch.nn.BatchNorm2d(2)])
        self.activation = torch.nn.functional.relu
        for parameter in self.parameters():
            torch.nn.init.constant_(parameter, float(seed()))
    @torch.inference_mode()
    @torch.autocast("cpu", dtype=torch.bfloat16)
    def forward(self, x: Settings) -> Pair: return x
def build(): return Net()
""",
}
UNKNOWN = {
    "slot_of_a_layer": """
class Net(torch.nn.Module):
    __slots__ = ("scale",)
    def __init__(self):
        super().__init__()
        self.scale = seed()
    def forward(self, x): return x * self.scale
def build(): return Net()
""",
    "descriptor": """
class Held:
    def __init__(self): self.value = seed()
    def __get__(self, *args): return self.value
class Net(torch.nn.Module):
    w = Held()
def build(): return Net()
""",
    "compiled_text": """
exec(compile(f"def head(x): return x * {seed()}", "head.py", "exec"), globals())
def build(): return lambda x: head(x)
""",
    "made_ufunc": """
def made():
    w = seed()
    return np.frompyfunc(lambda x: x * w, 1, 1)
F = made()
def build(): return lambda x: F(x)
""",
    "slots_of_a_list": """
class Held(list): __slots__ = ("scale",)
H = Held("ab")
H.scale = seed()
def build(): return lambda x: x * H.scale
""",
    "module_without_a_file": """
M = types.ModuleType("made")
M.scale = seed()
def build(): return lambda x: x * M.scale
""",
    "object_of_a_decorator": """
import contextlib
class Scale(contextlib.ContextDecorator):
    def __init__(self): self.value = seed()
    def __enter__(self): pass
    def __exit__(self, *args): pass
def build():
    @Scale()
    def predict(inputs): return inputs
    return predict
""",
}


@pytest.fixture
def version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Compute the version of a model whose module reads a number from a file, in a folder and with fresh modules."""
    monkeypatch.setattr(sys, "path", [*sys.path])

    def compute(place: str, text: str, number: int, **settings: Any) -> str:
        folder = tmp_path / place
        folder.mkdir(exist_ok=True)
        (folder / "seed").write_text(str(number))
        (folder / "versioned.py").write_text(_HEAD + text)
        for name in [name for name in sys.modules if name.partition(".")[0] in ("versioned", "heads")]:
            del sys.modules[name]
        sys.path[:] = [path for path in sys.path if not path.startswith(str(tmp_path))]
        importlib.invalidate_caches()
        source = ModelSource("factory", f"{folder}/versioned.py:build", **settings)
        built = import_target(source.target, "--factory")()
        return compute_version(source, module_of(source.target), built)

    return compute


@pytest.mark.parametrize("name", OTHER)
def test_another_model_is_another_version(version: Any, name: str) -> None:
    here, there, other = (version(place, OTHER[name], number) for place, number in (("a", 0), ("b", 0), ("c", 1)))
    assert here, "the version is known"
    assert here == there, "the same model has the same version elsewhere"
    assert here != other


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_cannot_be_hashed_is_unknown(version: Any, name: str) -> None:
    assert version("a", UNKNOWN[name], 0) == ""


@pytest.mark.parametrize("file", ["__init__.py", "none.txt"])
def test_modules_of_a_registry_count(version: Any, tmp_path: Path, file: str) -> None:
    """Modules that are imported by names in a loop, and used as attributes of their package."""

    def of(place: str, scale: int) -> str:
        folder = tmp_path / place / "heads"
        folder.mkdir(parents=True)
        loop = "import importlib\nfor name in ['linear']:\n    importlib.import_module(f'heads.{name}')\n"
        (folder / file).write_text(loop)
        (folder / "linear.py").write_text(f"def f(x): return x * {scale}\n")
        text = "import heads\n" + loop + "def build(): return lambda x: heads.linear.f(x)\n"
        return str(version(place, text, 0))

    assert of("a", 1) == of("b", 1) != of("c", 2)
    assert of("d", 1)


def test_an_import_binds_the_package(version: Any, tmp_path: Path) -> None:
    """A function that imports a package's module has the package, and so its other modules."""

    def of(place: str, scale: int) -> str:
        folder = tmp_path / place / "heads"
        folder.mkdir(parents=True)
        (folder / "__init__.py").touch()
        (folder / "used.py").touch()
        (folder / "linear.py").write_text(f"def f(x): return x * {scale}\n")
        text = """
from heads.used import __name__ as _
importlib.import_module("heads.linear")
def scaled(x):
    import heads.used
    return heads.linear.f(x)
def build(): return scaled
"""
        return str(version(place, text, 0))

    assert of("a", 1) == of("b", 1) != of("c", 2)
    assert of("d", 1)


@pytest.mark.parametrize("field", ["inputs", "outputs", "sample"])
def test_the_order_of_tensors_counts(version: Any, tmp_path: Path, field: str) -> None:
    found = []
    for names in (("a", "b"), ("b", "a")):
        given: Any = names
        if field == "sample":
            given = str(tmp_path / f"{names[0]}.npz")
            np.savez(given, **dict.fromkeys(names, np.zeros(1)))
        found.append(version("a", "def build(): return torch.nn.Identity()\n", 0, **{field: given}))
    assert all(found)
    assert found[0] != found[1]
