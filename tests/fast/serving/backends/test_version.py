"""The version of a model that Python code makes: another one for other weights, the same elsewhere, or unknown.

Versions are computed in two processes with a child for each model, as on another host or after a restart.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from edl.distill import DistillReader, Options
from edl.distill.cache import SoftLabelCache
from edl.errors import SettingsError
from edl.testing import LocalTeacher
from edl_serving.backends import ModelSource, open_backends
from edl_serving.backends.model_version import content_hash

pytestmark = pytest.mark.timeout(400)  # the first test waits for all models

_VERSIONS = """
import json, os, sys
import edl_serving.backends.torch  # once, for all children
from edl_serving.backends import ModelSource, open_backends

for folder, source in json.load(sys.stdin):
    read, write = os.pipe()
    if os.fork() == 0:
        os.chdir(folder)
        for path in source.pop("path", []):
            sys.path.insert(0, path)
        version = open_backends(ModelSource(**source))[0].version
        os.write(write, version.encode())
        os._exit(0)
    os.close(write)
    with open(read) as answer:
        print(json.dumps(answer.read() if os.wait()[1] == 0 else "failed"))
"""
_FOLD = 'import numpy as np\n\ndef predict(inputs):\n    return {"y": inputs["x"] @ %s}\n'
_FACTORY = {"kind": "factory", "target": "model.py:build"}

Model = Callable[[Path, int], dict[str, Any]]


def versions(models: list[tuple[Path, dict[str, Any]]]) -> list[str]:
    """The versions of models, each `(folder, what differs from the default ModelSource)`, by another process."""
    default = {
        "kind": "callable",
        "target": "model.py:predict",
        "inputs": ["x:float32[2]"],
        "outputs": ["y:float32[2]"],
    }
    sources = json.dumps([(str(folder), {**default, **more}) for folder, more in models])
    command = [sys.executable, "-c", _VERSIONS]
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path or str(Path.cwd()) for path in sys.path),
        "PYTHONHASHSEED": "random",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    done = subprocess.run(command, input=sources, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert "failed" not in found, done.stderr
    return found


def _array(folder: Path, seed: int) -> None:
    np.save(folder / "w.npy", np.random.default_rng(seed).normal(size=(2, 3)).astype("f4"))


def array_in_a_global(folder: Path, seed: int) -> dict[str, Any]:
    _array(folder, seed)
    (folder / "model.py").write_text(_FOLD % "W" + 'W = np.load("w.npy")\n')
    return {}


def array_of_a_class_beside_it(folder: Path, seed: int) -> dict[str, Any]:
    _array(folder, seed)
    (folder / "held.py").write_text('import numpy as np\n\nclass Held:\n    W = np.load("w.npy")\n')
    (folder / "model.py").write_text("from held import Held\n" + _FOLD % "Held.W")
    return {}


def constant_of_a_module_beside_it(folder: Path, seed: int) -> dict[str, Any]:
    (folder / "settings.py").write_text(f"SCALE = {seed}\n")
    code = 'from settings import SCALE\n\ndef predict(i):\n    return {"y": i["x"] * SCALE}\n'
    (folder / "model.py").write_text(code)
    return {}


def source_of_a_package_beside_it(folder: Path, seed: int) -> dict[str, Any]:
    (folder / "layers").mkdir()
    (folder / "layers" / "__init__.py").write_text("")
    (folder / "layers" / "scale.py").write_text(f"def scale(x):\n    return x * {seed}\n")
    code = (
        'def predict(i):\n    from layers import scale\n    return {"y": scale.scale(i["x"])}\n\nimport layers.scale\n'
    )
    (folder / "model.py").write_text(code)
    return {}


def numbers_read_from_a_file(folder: Path, seed: int) -> dict[str, Any]:
    (folder / "scale.json").write_text(json.dumps([seed, 2]))
    (folder / "model.py").write_text(_FOLD % "W" + 'import json\nW = json.loads(open("scale.json").read())\n')
    return {}


def text_read_from_a_file(folder: Path, seed: int) -> dict[str, Any]:
    (folder / "prompt.txt").write_text(f"prompt {seed}")
    (folder / "model.py").write_text(_FOLD % "1" + 'PROMPT = open("prompt.txt").read()\n')
    return {}


def set_in_a_closure(folder: Path, seed: int) -> dict[str, Any]:
    (folder / "tree.pkl").write_bytes(pickle.dumps({1, seed, "text", "more"}))
    code = """
import pickle

def build():
    with open("tree.pkl", "rb") as file:
        tree = pickle.load(file)
    return lambda inputs: {"y": inputs["x"] * len(tree)}
"""
    (folder / "model.py").write_text(code)
    return _FACTORY


def array_in_a_closure(folder: Path, seed: int) -> dict[str, Any]:
    _array(folder, seed)
    code = 'import numpy as np\n\ndef build():\n    w = np.load("w.npy")\n    return lambda i: {"y": i["x"] @ w}\n'
    (folder / "model.py").write_text(code)
    return _FACTORY


def array_in_a_default(folder: Path, seed: int) -> dict[str, Any]:
    _array(folder, seed)
    code = 'import numpy as np\n\ndef predict(i, w=np.load("w.npy")):\n    return {"y": i["x"] @ w}\n'
    (folder / "model.py").write_text(code)
    return {}


def arrays_of_two_names(folder: Path, seed: int) -> dict[str, Any]:
    (folder / "which").write_text(str(seed))
    code = "import numpy as np\nA, B = np.ones((2, 3)), np.zeros((2, 3))\nW = [A, B][int(open('which').read()) % 2]\n"
    (folder / "model.py").write_text(code + _FOLD % "W")
    return {}


def file_that_an_option_names(folder: Path, seed: int) -> dict[str, Any]:
    (folder / "native.bin").write_bytes(bytes([seed]))
    (folder / "model.py").write_text('def build(weights):\n    return lambda inputs: {"y": inputs["x"]}\n')
    return {**_FACTORY, "options": {"weights": str(folder / "native.bin")}}


def folder_that_an_option_names(folder: Path, seed: int) -> dict[str, Any]:
    weights = folder / "weights"
    (weights / "part").mkdir(parents=True, exist_ok=True)
    (weights / "part" / "native.bin").write_bytes(bytes([seed]))
    (weights / ".fetched").write_text(str(folder))
    (folder / "model.py").write_text('def build(weights):\n    return lambda inputs: {"y": inputs["x"]}\n')
    return {**_FACTORY, "options": {"weights": str(weights)}}


def what_belongs_to_the_host(folder: Path, seed: int) -> dict[str, Any]:
    """Besides the array: text that is a path, an environment, a logger."""
    _array(folder, seed)
    held = "import logging, pathlib\nfrom os import environ, getcwd\n_log = logging.getLogger(__name__)\n"
    held += "HOME, HERE = getcwd(), pathlib.Path(__file__).parent\n"
    (folder / "model.py").write_text(held + _FOLD % "W" + 'W = np.load("w.npy")\n')
    return {}


def installed_module(folder: Path, seed: int) -> dict[str, Any]:
    package = folder / "site-packages" / "installed"
    package.mkdir(parents=True, exist_ok=True)
    (package / "scale.json").write_text(json.dumps(seed))
    code = 'import json, pathlib\nSCALE = json.loads((pathlib.Path(__file__).parent / "scale.json").read_text())\n'
    (package / "__init__.py").write_text(code + 'def predict(i):\n    return {"y": i["x"] * SCALE}\n')
    return {"target": "installed:predict", "path": [str(package.parent)]}


def torch_module(attribute: str) -> Model:
    def model(folder: Path, seed: int) -> dict[str, Any]:
        torch.save(torch.tensor([float(seed)]), folder / "mean.pt")
        code = f"""
import torch

class Net(torch.nn.Module):
    def __init__(self, mean):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.LSTM(2, 3), torch.nn.TransformerEncoderLayer(4, 2))
        for parameter in self.parameters():
            torch.nn.init.constant_(parameter, 1.0)
        {attribute}

    @torch.no_grad()
    def forward(self, x):
        return x

def build():
    return Net(torch.load("mean.pt"))
"""
        (folder / "model.py").write_text(code)
        return {"kind": "torch-factory", "target": "model.py:build"}

    model.__name__ = attribute
    return model


def plain(value: str, name: str = "V") -> Model:
    """A global of a value that depends on the seed."""

    def model(folder: Path, seed: int) -> dict[str, Any]:
        (folder / "seed").write_text(str(seed))
        code = "import array, collections, decimal, enum, functools, types\nimport numpy as np\n"
        code += f"SEED = int(open('seed').read())\n{name} = {value}\ndel SEED\n"
        (folder / "model.py").write_text(code + _FOLD % "np.ones((2, 3))")
        return {}

    model.__name__ = value
    return model


def found_later(name: str, use: str) -> Model:
    """Code that a factory finds by a name that no import statement has."""

    def model(folder: Path, seed: int) -> dict[str, Any]:
        (folder / "archs").mkdir(exist_ok=True)
        code = f"class Net:\n    def transform(self, x): return x * {seed}\n\ndef transform(x): return x * {seed}\n"
        (folder / "archs" / "big.py").write_text(code)
        code = f"""
import importlib, importlib.util, pathlib, runpy
FOUND = {{}}
def predict(inputs):
    return {{"y": FOUND["f"](inputs["x"])}}

def build(arch):
    {use}
    return predict
"""
        (folder / "model.py").write_text(code)
        return {**_FACTORY, "options": {"arch": "big"}}

    model.__name__ = name
    return model


def code(name: str, text: str, **more: Any) -> Model:
    def model(folder: Path, seed: int) -> dict[str, Any]:
        (folder / "later.py").write_text("VALUE = 1\n")
        (folder / "model.py").write_text(text)
        return more

    model.__name__ = name
    return model


COMPUTED = [
    array_in_a_global,
    array_of_a_class_beside_it,
    constant_of_a_module_beside_it,
    source_of_a_package_beside_it,
    numbers_read_from_a_file,
    text_read_from_a_file,
    set_in_a_closure,
    array_in_a_closure,
    array_in_a_default,
    arrays_of_two_names,
    file_that_an_option_names,
    folder_that_an_option_names,
    what_belongs_to_the_host,
    installed_module,
    torch_module("self.register_buffer('mean', mean)"),
    torch_module("self.register_buffer('mean', mean, persistent=False)"),
    torch_module("self._mean = mean"),
    torch_module("self.mean = float(mean)"),
    torch_module("self.blocks = [torch.nn.Linear(1, 1).requires_grad_(False)]; self.blocks[0].load_state_dict("
                 "{'weight': mean[None], 'bias': mean})"),
    plain("np.full(3, SEED)", "__W__"),
    plain("SEED * 0.5", "__scale"),
    found_later("import_module", 'FOUND["f"] = importlib.import_module(f"archs.{arch}").transform'),
    found_later("dunder_import", 'FOUND["f"] = __import__(f"archs.{arch}", fromlist=["transform"]).transform'),
    *map(
        plain,
        [
            "collections.namedtuple('Norm', 'mean')(SEED)",
            "collections.Counter(a=SEED)",
            "collections.OrderedDict(a=SEED)",
            "collections.defaultdict(int, a=SEED)",
            "range(SEED)",
            "enum.Enum('Kind', 'A1 A2')[f'A{SEED}']",
            "np.zeros(2, [('a', 'i4'), (f'b{SEED}', 'i4')])",
            "np.float32(SEED)",
            "[{'a': 1, 'b': (SEED, float('nan'))}]",
            "{SEED, 7, 'text', 'more', 'words'}",
            "frozenset({bytes([SEED]), b'1', b'3'})",
            "f'text {SEED}'",
        ],
    ),
]  # fmt: skip

UNKNOWN = [
    found_later("method_of_an_object", 'FOUND["f"] = importlib.import_module(f"archs.{arch}").Net().transform'),
    found_later("run_path", 'FOUND["f"] = runpy.run_path(f"archs/{arch}.py")["transform"]'),
    found_later("run_module", 'FOUND["f"] = runpy.run_module(f"archs.{arch}")["transform"]'),
    found_later("exec", 'exec(pathlib.Path(f"archs/{arch}.py").read_text(), FOUND); FOUND["f"] = FOUND["transform"]'),
    found_later(
        "module_of_a_file",
        's = importlib.util.spec_from_file_location("n", f"archs/{arch}.py"); m = importlib.util.module_from_spec(s); '
        's.loader.exec_module(m); FOUND["f"] = m.transform',
    ),
    *map(
        plain,
        [
            "collections.UserDict(a=SEED)",
            "collections.deque([SEED])",
            "types.MappingProxyType({'a': SEED})",
            "functools.partial(max, SEED)",
            "decimal.Decimal(SEED)",
            "np.array([SEED, None], dtype=object)",
            "np.ma.masked_array([1, 2], [0, SEED - 1])",
            "array.array('f', [SEED])",
            "functools.lru_cache(lambda: SEED)",
            "open('seed')",
        ],
    ),
    code("variable_set_later", _FOLD % "W" + "W = None\n\ndef load():\n    global W\n"),
    code("dictionary_filled_later", _FOLD % "W['w']" + "W = {}\n"),
    code("dictionary_in_a_default", "def predict(i, cache={}):\n    return i\n"),
    code("module_imported_later", "def predict(i):\n    import later\n    return i\n"),
    code("callable_object", "class P:\n    def __call__(self, i): return i\n\npredict = P()\n"),
    code(
        "closure_set_later",
        "def build():\n    w = None\n    def predict(i):\n        nonlocal w\n        return i\n    return predict\n",
        **_FACTORY,
    ),
    code(
        "backend_without_a_version",
        "from edl_serving.backends.callable import CallableBackend\n\n"
        'def build():\n    return CallableBackend(lambda i: {"y": i["x"]}, ["x:float32[2]"])\n',
        **_FACTORY,
        inputs=[],
        outputs=[],
    ),
    torch_module("self.config = type('Config', (), {})()"),
    torch_module("self.register_forward_hook(lambda *args: None)"),
    torch_module("self.lazy = torch.empty(3, device='meta')"),
    torch_module("self.sparse = torch.eye(2).to_sparse()"),
]


@pytest.fixture(scope="module")
def computed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, str, str]]:
    """By model: its version, that of the same one in another folder and process, and that of another one."""
    here, there = tmp_path_factory.mktemp("here"), tmp_path_factory.mktemp("there")

    def made(folder: Path, model: Model, number: int, seed: int) -> tuple[Path, dict[str, Any]]:
        place = folder / f"{number}-{seed}"
        place.mkdir()
        return place, model(place, seed)

    models = [*COMPUTED, *UNKNOWN]
    first = versions([made(here, model, number, 1) for number, model in enumerate(models)])
    others = versions([made(there, model, number, seed) for number, model in enumerate(models) for seed in (1, 2)])
    names = [model.__name__ for model in models]
    return dict(zip(names, zip(first, others[::2], others[1::2], strict=True), strict=True))


@pytest.mark.parametrize("name", [model.__name__ for model in COMPUTED])
def test_other_weights_have_another_version(computed: dict[str, tuple[str, str, str]], name: str) -> None:
    here, there, changed = computed[name]
    assert here, "the version is known"
    assert here == there, "the same model has the same version in other places and processes"
    assert here != changed


@pytest.mark.parametrize("name", [model.__name__ for model in UNKNOWN])
def test_an_unknown_state_has_no_version(computed: dict[str, tuple[str, str, str]], name: str) -> None:
    assert computed[name] == ("", "", "")


def test_an_unknown_version_is_asked_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "asked.py").write_text("import collections\nW = collections.deque([1])\n" + _FOLD % "W")
    source = ModelSource("callable", f"{tmp_path}/asked.py:predict", inputs=("x:float32[2]",), outputs=("y:float32",))
    (backend,) = open_backends(source)
    assert backend.version == ""
    (line,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "the global asked.W is or holds a collections.deque" in line
    assert "--model-version" in line


def test_conjugate_and_negative_views_differ(tmp_path: Path) -> None:
    def served(view: str) -> str:
        text = f"import torch\n\ndef build():\n    a = torch.tensor([1 + 2j])\n    w = {view}\n"
        (tmp_path / "views.py").write_text(text + "    return lambda inputs: {'y': inputs['x'] * w.numpy()}\n")
        target = f"{tmp_path}/views.py:build"
        return open_backends(ModelSource("factory", target, inputs=("x:float32[2]",), outputs=("y:float32[2]",)))[
            0
        ].version

    found = {served(view) for view in ("a.resolve_conj()", "a.conj()", "a.conj().imag")}
    assert len(found - {""}) == 3


def test_copies_of_tensors_are_not_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies on the host, as of a model on a GPU; here, contiguous ones of transposed tensors."""
    copies: list[weakref.ref[Any]] = []
    most = 0
    tensor_parts = content_hash._tensor_parts

    def watched(where: str, torch: Any, tensor: Any) -> Any:
        nonlocal most
        head, content = tensor_parts(where, torch, tensor)
        copies.append(weakref.ref(content.obj))
        most = max(most, sum(copy() is not None for copy in copies))
        return head, content

    monkeypatch.setattr(content_hash, "_tensor_parts", watched)
    text = "import torch\nW = [(torch.ones(2, 3) * number).T for number in range(8)]\n"
    (tmp_path / "large.py").write_text(text + "def predict(i):\n    return {'y': i['x']}\n")
    assert open_backends(ModelSource("callable", f"{tmp_path}/large.py:predict", inputs=("x:float32[2]",)))[0].version
    assert 1 <= most <= 2


def test_the_function_that_is_named_counts(tmp_path: Path) -> None:
    text = "def one(inputs):\n    return inputs['x']\n\ndef two(inputs):\n    return -inputs['x']\n"
    (tmp_path / "pair.py").write_text(text)
    first, second, named = (
        open_backends(ModelSource("callable", f"{tmp_path}/pair.py:{name}", inputs=("x:float32[2]",), version=given))[0]
        for name, given in (("one", None), ("two", None), ("two", "mine"))
    )
    assert first.version != second.version
    assert named.version == "mine"


def test_a_backend_that_names_its_version(tmp_path: Path) -> None:
    text = """
from edl_serving.backends.callable import CallableBackend

def build():
    return CallableBackend(lambda inputs: inputs["x"], ["x:float32[2]"], version="mine")
"""
    (tmp_path / "own.py").write_text(text)
    (backend,) = open_backends(ModelSource("factory", f"{tmp_path}/own.py:build"))
    assert backend.version == "mine"
    with pytest.raises(SettingsError, match="--model-version means nothing"):
        open_backends(ModelSource("factory", f"{tmp_path}/own.py:build", version="yours"))


def test_labels_of_an_unknown_version(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    text = """
import collections

SCALES = collections.deque([2.0])

def build():
    return lambda inputs: {"y": inputs["x"] * SCALES[0]}
"""
    (tmp_path / "unknown.py").write_text(text)
    serve = {"input": "x:float32[1]", "output": "y:float32[1]"}
    rows = np.arange(20, dtype=np.float32)[:, None]
    with LocalTeacher(f"{tmp_path}/unknown.py:build", serve=serve) as teacher, SoftLabelCache() as cache:
        settings = {"cache": cache, "id_field": 1, "options": Options(teacher_timeout_s=60)}
        with DistillReader(["x", None], ["y"], teachers=teacher.endpoint, **settings) as reader:
            reader.set_batch_generator(lambda: iter([(rows, np.arange(20))]))
            for epoch in (1, 2):
                ((_, _, labels),) = reader()
                assert np.array_equal(labels, 2 * rows)
                assert reader.stats().rows_asked == 20 * epoch, "labels of an unknown version are not kept"
    (line,) = [record.getMessage() for record in caplog.records if "not kept in the cache" in record.getMessage()]
    assert "Name the version" in line
