"""The version of a model that Python code makes: another one for other weights, wherever they come from, else the same.

Each version is asked of a process of its own, as on another host or after a restart.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from edl.errors import SettingsError
from edl_serving.backends import ModelSource, open_backends
from edl_serving.backends import identity as identity_module

_TELL = """
import json, sys
from edl_serving.backends import ModelSource, open_backends
print(open_backends(ModelSource(**json.loads(sys.argv[1])))[0].version)
"""
_FOLD = 'import numpy as np\n\ndef predict(inputs):\n    return {"y": inputs["x"] @ %s}\n'


def version(
    folder: Path,
    target: str = "model.py:predict",
    kind: str = "callable",
    environment: Mapping[str, str] | None = None,
    **more: Any,
) -> str:
    source = json.dumps({"kind": kind, "target": target, "inputs": ["x:float32[2]"], "version": None, **more})
    paths = [*((environment or {}).get("EDL_TEST_PATH", "").split()), *(path or str(Path.cwd()) for path in sys.path)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONHASHSEED": "random", **(environment or {})}
    done = subprocess.run(
        [sys.executable, "-c", _TELL, source], cwd=folder, env=env, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()[-1]


def _array(folder: Path, seed: int) -> None:
    np.save(folder / "w.npy", np.random.default_rng(seed).normal(size=(2, 3)).astype("f4"))


def global_array(folder: Path, seed: int) -> dict[str, Any]:
    _array(folder, seed)
    (folder / "model.py").write_text(_FOLD % "W" + 'W = np.load("w.npy")\n')
    return {}


def array_of_a_module_beside_it(folder: Path, seed: int) -> dict[str, Any]:
    _array(folder, seed)
    (folder / "held.py").write_text(
        'import numpy as np\n\nclass Held:\n    def __init__(self): self.w = np.load("w.npy")\n'
    )
    (folder / "model.py").write_text("import held\n" + _FOLD % "HELD.w" + "HELD = held.Held()\n")
    return {}


def constant_of_a_module_beside_it(folder: Path, seed: int) -> dict[str, Any]:
    (folder / "settings.py").write_text(f"SCALE = {seed}\n")
    (folder / "model.py").write_text(
        'from settings import SCALE\n\ndef predict(i):\n    return {"y": i["x"] * SCALE}\n'
    )
    return {}


def numbers_read_from_a_file(folder: Path, seed: int) -> dict[str, Any]:
    (folder / "scale.json").write_text(json.dumps([seed, 2]))
    (folder / "model.py").write_text(_FOLD % "W" + 'import json\nW = json.load(open("scale.json"))\n')
    return {}


def opaque_object_read_by_a_factory(folder: Path, seed: int) -> dict[str, Any]:
    (folder / "tree.pkl").write_bytes(pickle.dumps({1, seed}))
    code = """
import pickle

def build():
    with open("tree.pkl", "rb") as file:
        tree = pickle.load(file)
    return lambda inputs: {"y": inputs["x"] * sum(tree)}
"""
    (folder / "model.py").write_text(code)
    return {"kind": "factory", "target": "model.py:build"}


def array_in_a_closure_that_nobody_opened(folder: Path, seed: int) -> dict[str, Any]:
    """As from safetensors, or from memory: no file is seen."""
    _array(folder, seed)
    code = """
import mmap, os
import numpy as np

def build():
    file = os.open("w.npy", os.O_RDWR)  # not opened for reading only, so not counted
    w = np.frombuffer(mmap.mmap(file, 0), np.float32)[-6:].reshape(2, 3).copy()
    return lambda inputs: {"y": inputs["x"] @ w}
"""
    (folder / "model.py").write_text(code)
    return {"kind": "factory", "target": "model.py:build"}


def file_that_an_option_names(folder: Path, seed: int) -> dict[str, Any]:
    (folder / "native.bin").write_bytes(bytes([seed]))
    (folder / "model.py").write_text('def build(weights):\n    return lambda inputs: {"y": inputs["x"]}\n')
    return {"kind": "factory", "target": "model.py:build", "options": {"weights": str(folder / "native.bin")}}


def folder_that_an_option_names(folder: Path, seed: int) -> dict[str, Any]:
    weights = folder / "weights"
    (weights / "part").mkdir(parents=True, exist_ok=True)
    (weights / "part" / "native.bin").write_bytes(bytes([seed]))
    (weights / ".fetched").write_text(str(folder))
    (folder / "model.py").write_text('def build(weights):\n    return lambda inputs: {"y": inputs["x"]}\n')
    return {"kind": "factory", "target": "model.py:build", "options": {"weights": str(weights)}}


def model_that_holds_what_belongs_to_the_process(folder: Path, seed: int) -> dict[str, Any]:
    _array(folder, seed)
    held = (
        "import multiprocessing\nfrom os import environ\nWORKER = multiprocessing.Process(target=print)\n"
        'HOME = environ.get("HOME")\n'
    )
    (folder / "model.py").write_text(held + _FOLD % "W" + 'W = np.load("w.npy")\n')
    return {"environment": {"EDL_PLACE": str(folder)}}


def file_read_by_an_installed_module(folder: Path, seed: int) -> dict[str, Any]:
    package = folder / "site-packages" / "installed"
    package.mkdir(parents=True, exist_ok=True)
    (package / "scale.json").write_text(json.dumps({"by": seed}))
    code = """
import json, pathlib

class Scale:
    def __init__(self, by): self.by = by

with open(pathlib.Path(__file__).parent / "scale.json") as file:
    SCALE = Scale(**json.load(file))

def predict(inputs):
    return {"y": inputs["x"] * SCALE.by}
"""
    (package / "__init__.py").write_text(code)
    return {"target": "installed:predict", "environment": {"EDL_TEST_PATH": str(package.parent)}}


def _plain(value: str, name: str = "V") -> Callable[[Path, int], dict[str, Any]]:
    def model(folder: Path, seed: int) -> dict[str, Any]:
        code = "import os, array, collections, decimal, fractions, functools, types\nimport numpy as np\n"
        code += f"SEED = int(os.environ['EDL_SEED'])\n{name} = {value}\n"
        (folder / "model.py").write_text(code + "del SEED\n" + _FOLD % "np.ones((2, 3))")
        return {"environment": {"EDL_SEED": str(seed)}}

    model.__name__ = value
    return model


def backend_that_says_no_version(folder: Path, seed: int) -> dict[str, Any]:
    _array(folder, seed)
    code = """
import numpy as np
from edl_serving.backends.callable import CallableBackend

def build():
    w = np.load("w.npy")
    return CallableBackend(lambda inputs: {"y": inputs["x"] @ w}, ["x:float32[2]"])
"""
    (folder / "model.py").write_text(code)
    return {"kind": "factory", "target": "model.py:build", "inputs": []}


def _found_later(name: str, use: str) -> Callable[[Path, int], dict[str, Any]]:
    def model(folder: Path, seed: int) -> dict[str, Any]:
        (folder / "archs").mkdir(exist_ok=True)
        (folder / "archs" / "big.py").write_text(
            f"class Net:\n    def transform(self, x): return x * {seed}\n\ntransform = Net().transform\n"
        )
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
        return {"kind": "factory", "target": "model.py:build", "options": {"arch": "big"}}

    model.__name__ = name
    return model


def imported_by_importlib_at_the_top(folder: Path, seed: int) -> dict[str, Any]:
    (folder / "plug.py").write_text(f"def f(x): return x * {seed}\n")
    code = 'import importlib\nP = importlib.import_module("pl" + "ug")\n'
    (folder / "model.py").write_text(code + 'def predict(inputs):\n    return {"y": P.f(inputs["x"])}\n')
    return {}


FOUND_LATER = {
    "import_module": 'FOUND["f"] = importlib.import_module(f"archs.{arch}").transform',
    "import_module_for_a_class": 'FOUND["f"] = importlib.import_module(f"archs.{arch}").Net().transform',
    "dunder_import": 'FOUND["f"] = __import__(f"archs.{arch}", fromlist=["transform"]).transform',
    "run_path": 'FOUND["f"] = runpy.run_path(f"archs/{arch}.py")["transform"]',
    "run_module": 'FOUND["f"] = runpy.run_module(f"archs.{arch}")["transform"]',
    "exec_of_a_file": 'exec(pathlib.Path(f"archs/{arch}.py").read_text(), FOUND); FOUND["f"] = FOUND["transform"]',
    "module_of_a_file": (
        's = importlib.util.spec_from_file_location("n", f"archs/{arch}.py"); m = importlib.util.module_from_spec(s); '
        's.loader.exec_module(m); FOUND["f"] = m.transform'
    ),
}
MODELS = [
    imported_by_importlib_at_the_top,
    *(_found_later(name, use) for name, use in FOUND_LATER.items()),
    global_array,
    array_of_a_module_beside_it,
    constant_of_a_module_beside_it,
    numbers_read_from_a_file,
    opaque_object_read_by_a_factory,
    array_in_a_closure_that_nobody_opened,
    file_that_an_option_names,
    folder_that_an_option_names,
    model_that_holds_what_belongs_to_the_process,
    backend_that_says_no_version,
    file_read_by_an_installed_module,
    _plain("np.full(3, SEED)", "__W__"),
    _plain("SEED * 0.5", "__scale"),
    *map(
        _plain,
        [
            "collections.namedtuple('Norm', 'mean')(SEED)",
            "collections.Counter(a=SEED)",
            "collections.OrderedDict(a=SEED)",
            "collections.defaultdict(int, a=SEED)",
            "collections.ChainMap({}, {'a': SEED})",
            "collections.UserDict(a=SEED)",
            "collections.UserList([SEED])",
            "types.MappingProxyType({'a': SEED})",
            "functools.partial(max, SEED, key=None)",
            "decimal.Decimal(SEED)",
            "fractions.Fraction(SEED, 7)",
            "range(SEED)",
            "slice(0, SEED)",
            "np.array([SEED, None], dtype=object)",
            "np.ma.masked_array([1, 2], [0, SEED - 1])",
            "np.ma.masked_array([1, 2], fill_value=SEED)",
            "np.zeros(2, [('a', 'i4'), (f'b{SEED}', 'i4')])",
            "np.float32(SEED)",
            "[{'a': 1, 'b': (SEED, float('nan'))}]",
            "{SEED, 7, 'text', 'more', 'words'}",
            "collections.deque([np.full(3, SEED)])",
            "array.array('f', [SEED])",
            "memoryview(bytes([SEED]))",
            "frozenset({bytes([SEED]), b'1', b'3'})",
        ],
    ),
]


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
def test_other_weights_have_another_version_and_the_same_ones_elsewhere_the_same(
    model: Callable[[Path, int], dict[str, Any]], tmp_path: Path
) -> None:
    here, there = tmp_path / "here", tmp_path / "somewhere" / "else"
    for folder in (here, there):
        folder.mkdir(parents=True)
    first = version(here, **model(here, 1))
    assert version(there, **model(there, 1)) == first
    assert version(here, **model(here, 2)) != first


def test_cached_bytecode_is_no_other_model(tmp_path: Path) -> None:
    asked = _found_later("", FOUND_LATER["import_module"])(tmp_path, 1)
    bare = version(tmp_path, **{**asked, "environment": {"PYTHONDONTWRITEBYTECODE": "1"}})
    asked["environment"] = {"PYTHONDONTWRITEBYTECODE": ""}
    assert version(tmp_path, **asked) == bare
    assert (tmp_path / "archs" / "__pycache__").is_dir()
    assert version(tmp_path, **asked) == bare


def test_a_torch_factory_counts_found_modules(tmp_path: Path) -> None:
    use = 'import torch; importlib.import_module(f"archs.{arch}"); return torch.nn.Identity()'
    one, two = (
        version(tmp_path, **{**_found_later("", use)(tmp_path, seed), "kind": "torch-factory"}) for seed in (1, 2)
    )
    assert one != two


def test_a_torch_factory_s_version_counts_its_code_and_tensors_outside_the_state(tmp_path: Path) -> None:
    def served(code: str, mean: float) -> str:
        torch.save(torch.tensor([mean]), tmp_path / "mean.pt")
        text = f"""
import torch

class Net(torch.nn.Module):
    def __init__(self, mean):
        super().__init__()
        self.mean = mean

    def forward(self, x):
        return {code}

def build():
    return Net(torch.load({str(tmp_path / "mean.pt")!r}))
"""
        (tmp_path / "net.py").write_text(text)
        (backend,) = open_backends(ModelSource("torch-factory", f"{tmp_path}/net.py:build", inputs=("x:float32[2]",)))
        backend.close()
        return backend.version

    first = served("x - self.mean", 1.0)
    assert served("x - self.mean", 1.0) == first
    assert served("x - self.mean", 2.0) != first
    assert served("x + self.mean", 1.0) != first


_PRIVATE = """
import json
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        %s

    def forward(self, x):
        return x

def build():
    return Net()
"""


def _built(folder: Path) -> str:
    (backend,) = open_backends(ModelSource("torch-factory", f"{folder}/net.py:build", inputs=("x:float32[2]",)))
    backend.close()
    return backend.version


def test_a_torch_factory_s_private_tensors_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = _PRIVATE.replace("import json", "import os") % 'self._mean = torch.tensor(float(os.environ["EDL_MEAN"]))'
    (tmp_path / "net.py").write_text(code)
    versions = []
    for mean in ("1", "1", "2"):
        monkeypatch.setenv("EDL_MEAN", mean)
        versions.append(_built(tmp_path))
    assert versions[0] == versions[1] != versions[2]


def test_files_that_a_torch_factory_reads_count(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(
        _PRIVATE % f"with open({str(tmp_path / 'mean.json')!r}) as file: self.mean = json.load(file)"
    )
    versions = []
    for mean in (1.0, 1.0, 2.0):
        (tmp_path / "mean.json").write_text(json.dumps(mean))
        versions.append(_built(tmp_path))
    assert versions[0] == versions[1] != versions[2]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize(
    "tensor", ["torch.nn.LazyLinear(3)", "torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])"]
)
def test_a_tensor_that_cannot_be_read_is_no_error_and_is_said_once(
    tensor: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "unread.py").write_text(f"import torch\nA = {tensor}\nB = {tensor}\n{_FOLD % 'A'}")
    caplog.set_level("WARNING", logger="edl_serving")
    source = ModelSource(
        "callable", f"{tmp_path}/unread.py:predict", inputs=("x:float32[2]",), outputs=("y:float32[2]",)
    )
    assert open_backends(source)[0].version
    (line,) = [record.getMessage() for record in caplog.records if "--model-version" in record.getMessage()]
    assert "cannot be read" in line


def test_conjugate_and_negative_views_count_by_their_values(tmp_path: Path) -> None:
    def served(view: str) -> str:
        code = f"import torch\n\ndef build():\n    a = torch.tensor([1 + 2j])\n    w = {view}\n"
        (tmp_path / "views.py").write_text(code + "    return lambda inputs: {'y': inputs['x'] * w.numpy()}\n")
        source = ModelSource(
            "factory", f"{tmp_path}/views.py:build", inputs=("x:float32[2]",), outputs=("y:float32[2]",)
        )
        return open_backends(source)[0].version

    assert len({served(view) for view in ("a.resolve_conj()", "a.conj()", "a.conj().imag")}) == 3


@pytest.mark.parametrize(
    "save", ['np.save("w.npy", W)', 'np.save("other.npy", W); os.replace("other.npy", "w.npy")'], ids=["save", "rename"]
)
def test_what_the_first_start_computes_and_keeps_is_no_other_model_at_the_next(save: str, tmp_path: Path) -> None:
    code = f"""
import os
import numpy as np

if os.path.exists("w.npy"):
    W = np.load("w.npy")
else:
    W = np.ones((2, 3), np.float32)
    {save}
with open("model.log", "a") as log:
    print("started", os.getpid(), file=log)

def predict(inputs):
    return {{"y": inputs["x"] @ W}}
"""
    (tmp_path / "model.py").write_text(code)
    assert version(tmp_path) == version(tmp_path)


def test_copies_of_tensors_are_not_held_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies on the host, as of a model on a GPU; here, dense ones of sparse tensors."""
    copies: list[weakref.ref[Any]] = []
    most = 0
    of_tensor = identity_module._of_tensor

    def watched(torch: Any, tensor: Any) -> Any:
        nonlocal most
        head, content = of_tensor(torch, tensor)
        copies.append(weakref.ref(content.obj))
        most = max(most, sum(copy() is not None for copy in copies))
        return [head, content]

    monkeypatch.setattr(identity_module, "_of_tensor", watched)
    code = "import torch\nW = [torch.eye(2).to_sparse() * number for number in range(8)]\n"
    (tmp_path / "large.py").write_text(code + "def predict(i):\n    return {'y': i['x']}\n")
    net = "class Net(torch.nn.Identity):\n    w = 1\n\ndef build():\n    net = Net()\n    net._w = W\n    return net\n"
    (tmp_path / "large_net.py").write_text(code + net)
    open_backends(ModelSource("callable", f"{tmp_path}/large.py:predict", inputs=("x:float32[2]",)))
    open_backends(ModelSource("torch-factory", f"{tmp_path}/large_net.py:build", inputs=("x:float32[2]",)))
    assert 1 <= most <= 2


def test_what_is_named_counts_and_what_is_loaded_later_needs_a_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    code = (
        "import numpy as np\n\ndef one(inputs):\n    return inputs['x']\n\ndef two(inputs):\n    return -inputs['x']\n"
    )
    (tmp_path / "pair.py").write_text(code)
    one, two, named = (
        open_backends(ModelSource("callable", f"{tmp_path}/pair.py:{name}", inputs=("x:float32[2]",), version=given))[0]
        for name, given in (("one", None), ("two", None), ("two", "mine"))
    )
    assert one.version != two.version
    assert named.version == "mine"


def test_what_a_version_is_made_of_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    _array(tmp_path, 1)
    (tmp_path / "said.py").write_text(_FOLD % "W" + f"W = np.load({str(tmp_path / 'w.npy')!r})\n")
    caplog.set_level("INFO", logger="edl_serving")
    open_backends(ModelSource("callable", f"{tmp_path}/said.py:predict", inputs=("x:float32[2]",)))
    (line,) = [record.getMessage() for record in caplog.records if "is a hash of" in record.getMessage()]
    assert "said.py, w.npy and 1 arrays" in line
    assert "--model-version" in line


def test_a_backend_with_a_version_of_its_own_cannot_be_given_another(tmp_path: Path) -> None:
    code = """
from edl_serving.backends.callable import CallableBackend

def build():
    return CallableBackend(lambda inputs: inputs["x"], ["x:float32[2]"], version="mine")
"""
    (tmp_path / "own.py").write_text(code)
    (backend,) = open_backends(ModelSource("factory", f"{tmp_path}/own.py:build"))
    assert backend.version == "mine"
    with pytest.raises(SettingsError, match="--model-version means nothing"):
        open_backends(ModelSource("factory", f"{tmp_path}/own.py:build", version="yours"))
