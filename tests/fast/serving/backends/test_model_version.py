"""The version of a model that Python code makes: another one for other weights, the same elsewhere, or unknown.

A model's module reads a number from a file beside it: the same source makes different models.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from edl.errors import SettingsError
from edl.protocol import names
from edl_serving.backends import open_backends
from edl_serving.backends.model_version import compute_version
from edl_serving.backends.source import ModelSource, import_target, module_of
from edl_serving.model import ServedModel
from edl_serving.settings import ServerSettings
from tests.fast.serving.conftest import TIMEOUT_S

_HEAD = """
import collections, enum, functools, importlib, re, sys, types
import numpy as np
import torch
from pathlib import Path

def seed():
    return int(Path(__file__).with_name("seed").read_text())

"""

_BESIDE = """
import numpy as np
from pathlib import Path
SCALE = int(Path(__file__).with_name("seed").read_text())
class Held:
    W = np.full(2, SCALE)
    def transform(self, x): return x * SCALE
"""

OTHER = {
    "order_of_a_vocabulary_with_a_slash": """
VOCABULARY = ["/", "a"] if seed() else ["a", "/"]
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
    "configuration_of_transformers": """
from transformers import PreTrainedConfig, GenerationConfig
def build():
    net = torch.nn.Identity()
    part = PreTrainedConfig(name_or_path=__file__, act=seed())
    net.config = PreTrainedConfig(name_or_path=__file__, text_config=part)
    net.generation_config = GenerationConfig()
    return net
""",
    "mode_of_a_layer": """
def build(): return torch.nn.Dropout().train(bool(seed()))
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
        for kind in ("staticmethod", "property", "functools.cached_property")
    },
    "set_of_a_lambda": "def build(): return [lambda x: x in {'a', 'b'}, lambda x: x in {'a', 'c'}][seed()]\n",
    "long_pattern": "P = re.compile('a' * 300 + str(seed()))\ndef build(): return lambda x: P.sub('', x)\n",
    "values_of_an_enum": """
class Kind(enum.Enum):
    A = 1 + seed()
def build():
    kind = Kind.A
    return lambda x: x * kind.value
""",
    "ufunc": "F = [np.sin, np.cos][seed()]\ndef build(): return lambda x: F(x)\n",
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
    "class_of_a_module_beside_it": "from beside import Held\ndef build(): return lambda x: x @ Held.W\n",
    "beside_what_belongs_to_the_host": """
import logging
from os import environ, getcwd
_log = logging.getLogger(__name__)
HOME, HERE = getcwd(), Path(__file__).parent
W = np.full(2, seed())
def build(): return lambda x: (x @ W, _log, HOME, HERE, environ)
""",
    **{
        f"torch_{name}": f"""
class Net(torch.nn.Module):
    def __init__(self, mean):
        super().__init__()
        {line}
    @torch.no_grad()
    def forward(self, x): return x
def build(): return Net(torch.tensor([float(seed())]))
"""
        for name, line in (
            ("buffer", "self.register_buffer('mean', mean, persistent=False)"),
            ("layers", "self.blocks = [torch.nn.Embedding(1, 1, _weight=mean[None])]"),
        )
    },
    **{
        value: f"{name} = {value}\ndef build(): return lambda x: (x, {name})\n"
        for name, value in (
            ("__W__", "np.full(3, seed())"),
            ("V", "collections.namedtuple('Norm', 'mean')(seed())"),
            ("V", "[{'a': 1, 'b': (seed(), float('nan'))}]"),
            ("V", "{seed(), 7, 'text', 'more', 'words'}"),
        )
    },
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
    "compiled_text": """
exec(compile(f"def head(x): return x * {seed()}", "head.py", "exec"), globals())
def build(): return lambda x: head(x)
""",
    "module_without_a_file": """
M = types.ModuleType("made")
M.scale = seed()
def build(): return lambda x: x * M.scale
""",
    **{
        value: f"V = {value}\ndef build(): return lambda x: (x, V)\n"
        for value in (
            "collections.deque([seed()])",
            "np.array([seed(), None], dtype=object)",
            "np.ma.masked_array([1, 2], [0, seed()])",
        )
    },
    **{
        name: f"""
import beside
FOUND = {{}}
def build():
    {use}
    return lambda x: FOUND['f'](x)
"""
        for name, use in (
            ("method_of_an_object", "FOUND['f'] = beside.Held().transform"),
            ("exec", "exec('def f(x): return x * %d' % seed(), FOUND)"),
        )
    },
    "variable_set_later": "W = None\ndef load():\n    global W\ndef build(): return lambda x: x @ W\n",
    "dictionary_filled_later": "W = {}\ndef build(): return lambda x: x @ W['w']\n",
    "dictionary_in_a_default": "def build(): return lambda x, cache={}: x\n",
    "module_imported_later": """
def build():
    def predict(i):
        import later
        return i
    return predict
""",
    **{
        f"torch_{name}": f"""
def build():
    net = torch.nn.Linear(1, 1)
    {line}
    return net
"""
        for name, line in (
            ("hook", "net.register_forward_hook(lambda *args: None)"),
            ("meta", "net.lazy = torch.empty(3, device='meta')"),
            ("sparse", "net.sparse = torch.eye(2).to_sparse()"),
        )
    },
}


def written(folder: Path, text: str, number: int) -> str:
    """Write a model; its target."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "seed").write_text(str(number))
    (folder / "beside.py").write_text(_BESIDE)
    (folder / "later.py").touch()
    (folder / "versioned.py").write_text(_HEAD + text)
    return f"{folder}/versioned.py:build"


@pytest.fixture
def version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Compute the version of a model, with fresh modules."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    own = ("versioned", "beside", "later", "heads", "installed")

    def forget() -> None:
        for name in [name for name in sys.modules if name.partition(".")[0] in own]:
            del sys.modules[name]
        sys.path[:] = [path for path in sys.path if not path.startswith(str(tmp_path))]
        importlib.invalidate_caches()

    def compute(place: str, text: str, number: int, **settings: Any) -> str:
        forget()
        source = ModelSource("factory", written(tmp_path / place, text, number), **settings)
        built = import_target(source.target, "--factory")(**source.options)
        return compute_version(source, module_of(source.target), built)

    yield compute
    forget()


@pytest.mark.parametrize("name", OTHER)
def test_another_model_is_another_version(version: Any, name: str) -> None:
    here, there, other = (version(place, OTHER[name], number) for place, number in (("a", 0), ("b", 0), ("c", 1)))
    assert here, "the version is known"
    assert here == there, "the same model has the same version elsewhere"
    assert here != other


_ELSEWHERE = """
import sys
from edl_serving.backends.model_version import compute_version
from edl_serving.backends.source import ModelSource
from edl_serving.backends.source import import_target, module_of
for target in sys.argv[1:]:
    for name in ("versioned", "beside"):
        sys.modules.pop(name, None)
    built = import_target(target, "--factory")()
    print(compute_version(ModelSource("factory", target), module_of(target), built))
"""


def test_a_version_is_the_same_in_any_process(version: Any, tmp_path: Path) -> None:
    """Whatever the order is in which that one keeps its sets."""
    names = ["{seed(), 7, 'text', 'more', 'words'}", "set_of_a_lambda", "usual_code", "class_of_a_module_beside_it"]
    here = [version(str(number), OTHER[name], 1) for number, name in enumerate(names)]
    targets = [written(tmp_path / f"there-{number}", OTHER[name], 1) for number, name in enumerate(names)]
    env = {**os.environ, "PYTHONHASHSEED": "7", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", _ELSEWHERE, *targets]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.stdout.split() == here, done.stderr


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


@pytest.mark.parametrize("field", ["inputs", "outputs"])
def test_the_order_of_tensors_counts(version: Any, field: str) -> None:
    text = "def build(): return torch.nn.Identity()\n"
    first, second = (version("a", text, 0, **{field: names}) for names in (("a", "b"), ("b", "a")))
    assert "" != first != second != ""


@pytest.mark.parametrize("file", ["weights/native.bin", "native.bin"])
def test_what_an_option_names_counts(version: Any, tmp_path: Path, file: str) -> None:
    """A file, or a folder with all that is in it but what is hidden."""
    text = "def build(weights): return lambda x: x\n"

    def of(place: str, content: bytes) -> str:
        folder = tmp_path / place
        (folder / "weights").mkdir(parents=True, exist_ok=True)
        (folder / "weights" / ".fetched").write_text(place)
        (folder / file).write_bytes(content)
        return str(version(place, text, 0, options={"weights": str(folder / file.partition("/")[0])}))

    assert of("a", b"1") == of("b", b"1") != of("c", b"2")
    assert of("d", b"1")


def test_the_function_that_is_named_counts(tmp_path: Path) -> None:
    text = "def one(inputs):\n    return inputs['x']\n\ndef two(inputs):\n    return -inputs['x']\n"
    (tmp_path / "pair.py").write_text(text)
    first, second = (
        open_backends(ModelSource("callable", f"{tmp_path}/pair.py:{name}", inputs=("x:float32[2]",)))[0].version
        for name in ("one", "two")
    )
    assert first != second


@pytest.mark.parametrize("named", [None, "0123456789abcdef"])
def test_only_a_hash_is_called_one(tmp_path: Path, named: str | None) -> None:
    (tmp_path / "net.py").write_text("def predict(inputs):\n    return inputs['x']\n")
    source = ModelSource("callable", f"{tmp_path}/net.py:predict", inputs=("x:float32[2]",), version=named)
    model = ServedModel(ServerSettings(model="m"), open_backends(source))
    announced = model.config().config.parameters[names.WEIGHTS_VERSION].string_value
    assert announced == ("" if named else model.version)


def test_a_backend_that_names_its_version(tmp_path: Path) -> None:
    text = """
from edl_serving.backends.callable import CallableBackend

def build(rows):
    return CallableBackend(lambda inputs: inputs["x"], ["x:float32[2]"], version=f"mine-{rows}")
"""
    (tmp_path / "own.py").write_text(text)
    source = ModelSource("factory", f"{tmp_path}/own.py:build", options={"rows": 3})
    (backend,) = open_backends(source)
    assert backend.version == "mine-3"
    for given, words in (({"version": "yours"}, "--model-version"), ({"inputs": ("x:float32",)}, "--input")):
        with pytest.raises(SettingsError, match=f"{words} does not apply"):
            open_backends(replace(source, **given))
