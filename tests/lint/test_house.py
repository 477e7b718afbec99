"""The repository's own rules: light imports, documented parameters, generated files up to date, a complete wheel."""

from __future__ import annotations

import ast
import email
import importlib.metadata
import inspect
import os
import re
import subprocess
import sys
import textwrap
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import edl
from tests.lint.test_public_names import PUBLIC, load

ROOT = Path(__file__).resolve().parents[2]
CLEAN = {name: value for name, value in os.environ.items() if not name.startswith("EDL_")}


Function = ast.FunctionDef | ast.AsyncFunctionDef


def python(*arguments: str) -> str:
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=ROOT, env=CLEAN, capture_output=True, text=True, timeout=110, check=True).stdout


@pytest.mark.parametrize(
    ("imported", "unwanted"),
    [
        ("edl", "numpy grpc google.protobuf torch paddle rich sqlite3 asyncio"),
        ("edl.cli", "numpy grpc google.protobuf torch paddle rich sqlite3 asyncio"),
        ("edl.discovery", "numpy grpc torch paddle consul requests"),
        ("edl.distill", "torch paddle consul requests"),
        ("edl_serving", "torch paddle consul requests"),
        ("edl.testing", "torch paddle"),
    ],
)
def test_imports_stay_light(imported: str, unwanted: str) -> None:
    code = f"import sys, {imported}; print(*(name for name in {unwanted.split()} if name in sys.modules))"
    assert python("-c", code).split() == []


@pytest.mark.parametrize("name", ["etcd", "kserve", "master", "store"])
def test_generated_protocol_is_up_to_date(tmp_path: Path, name: str) -> None:
    python(
        *("-m", "grpc_tools.protoc", f"--proto_path={ROOT / 'edl/protocol'}", f"{name}.proto"),
        *(f"--descriptor_set_out={tmp_path / f'{name}.binpb'}", f"--pyi_out={tmp_path}"),
    )
    assert (tmp_path / f"{name}.binpb").read_bytes() == (ROOT / f"edl/protocol/{name}.binpb").read_bytes()
    assert (tmp_path / f"{name}_pb2.pyi").read_text() == (ROOT / f"edl/protocol/{name}.pyi").read_text(), (
        "run `make protocol`"
    )


def test_version_is_the_same_everywhere() -> None:
    """The version is said once and the same everywhere."""
    pyproject = (ROOT / "pyproject.toml").read_text()
    declared = re.search(r'^version = "(.+)"$', pyproject, re.MULTILINE)
    assert declared is not None
    assert declared[1] == edl.__version__ == importlib.metadata.version("elastic-distill")
    changelog = (ROOT / "CHANGELOG.md").read_text()
    assert f"## {edl.__version__}" in changelog
    chart = (ROOT / "serving/kube/chart/Chart.yaml").read_text()
    assert re.findall(r"^(?:version|appVersion): (.+)$", chart, re.MULTILINE) == [edl.__version__] * 2
    tagged = [*ROOT.glob("docs/*.md"), *ROOT.glob("serving/docker/*"), *ROOT.glob("serving/kube/manifests/*")]
    tags = {tag for path in tagged for tag in re.findall(r"/edl/[a-z-]+:([\d.]+\d)", path.read_text())}
    assert tags == {edl.__version__}


def test_packages_have_exactly_the_sources(tmp_path: Path) -> None:
    """The sdist, and the wheel that is built from it."""
    python("-m", "hatchling", "build", "--target", "sdist", "--directory", str(tmp_path))
    (sdist,) = map(str, tmp_path.glob("*.tar.gz"))
    python("-m", "pip", "wheel", "-qq", "--no-deps", "--no-build-isolation", "--wheel-dir", str(tmp_path), sdist)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        metadata = email.message_from_bytes(archive.read(f"elastic_distill-{edl.__version__}.dist-info/METADATA"))
        entry_points = archive.read(f"elastic_distill-{edl.__version__}.dist-info/entry_points.txt").decode()
    sources = _sources(ROOT / "edl") | _sources(ROOT / "serving/edl_serving")
    assert sources <= names, f"missing in the wheel: {sorted(sources - names)}"
    others = {name for name in names - sources if f"elastic_distill-{edl.__version__}.dist-info/" not in name}
    assert others == set()
    compiled = {f"edl/protocol/{name}.binpb" for name in ("etcd", "kserve", "master", "store")}
    assert {"edl/py.typed", "edl_serving/py.typed"} | compiled <= names
    assert metadata["License-Expression"] == "Apache-2.0"
    assert f"elastic_distill-{edl.__version__}.dist-info/licenses/LICENSE" in names
    assert "edl = edl.cli:main" in entry_points
    assert str(metadata.get_payload()).strip(), "the README is the description"


def _sources(package: Path) -> set[str]:
    return {
        str(path.relative_to(package.parent))
        for path in package.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def test_constraints_cover_what_is_declared() -> None:
    """Every package named in pyproject.toml is pinned, or the tests run with whatever is newest that day."""
    text = (ROOT / "pyproject.toml").read_text()
    pinned = {line.partition("==")[0].lower() for line in (ROOT / "constraints.txt").read_text().splitlines()}
    block = text[text.index("\ndependencies = [") : text.index("[project.scripts]")]
    declared = {
        match[1].lower() for match in re.finditer(r'"([A-Za-z0-9-]+)(?:\[[a-z,]+\])?(?:[<>=;][^"]*)?"', block)
    } - {"elastic-distill", "tomli"}
    assert len(declared) > 20
    assert {name.replace("_", "-") for name in declared} <= {name.replace("_", "-") for name in pinned}


def test_no_registry_or_machine_is_named() -> None:
    """Sources install from wherever the user's pip is set up to look."""
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    if tracked.returncode:
        pytest.skip("not a git checkout")
    texts = {".py", ".md", ".toml", ".txt", ".sh", ".yaml", ""}
    for path in (ROOT / name for name in tracked.stdout.split("\0") if name):
        if path.suffix in texts and path.is_file() and path != Path(__file__):
            text = path.read_text(errors="replace")
            assert "--index-url" not in text, path
            assert not re.search(r"/(root|home/\w+|work)/", text), f"{path} names a folder of one machine"


CONTRACTS = {
    "edl.background": ["BackgroundLoop", "start_call"],
    "edl.backoff": ["Backoff"],
    "edl.discovery.balance": ["balance"],
    "edl.discovery.registry": ["Registration", "Registry", "Watch"],
    "edl.discovery.store": ["Election", "Lease", "Store", "StoreWatch"],
}
"""Beside `PUBLIC`, what others implement or build on."""


@pytest.mark.parametrize("module", sorted(PUBLIC | CONTRACTS))
def test_exported_callables_are_documented(module: str) -> None:
    """An entry under `Args:` (`Attributes:` of a dataclass) for each parameter, and what is returned and raised."""
    found = load(module)
    offered = [getattr(found, name) for name in (PUBLIC | CONTRACTS)[module]]
    missing = {
        call.__qualname__: gaps for each in offered for call, text in callables(each) if (gaps := gaps_in(call, text))
    }
    assert not missing


def callables(found: Any) -> Iterator[tuple[Any, str]]:
    """Yield a function, or the constructor and the public methods of a class, and their docstrings.

    What overrides a documented method has its docstring there.
    """
    if inspect.isfunction(found):
        yield found, found.__doc__ or ""
    for name, part in vars(found).items() if inspect.isclass(found) else ():
        function = inspect.unwrap(getattr(part, "fget", None) or getattr(part, "__func__", part))
        if not inspect.isfunction(function) or function.__module__ != found.__module__:
            continue
        if name == "__init__" and not function.__code__.co_filename.startswith("<"):  # not a dataclass's
            yield function, f"{function.__doc__ or ''}{found.__doc__}"
        elif not name.startswith("_") and (function.__doc__ or found.__bases__ == (object,)):
            yield function, function.__doc__ or ""


def gaps_in(function: Any, text: str) -> list[str]:
    """Return the parameters, "Returns" and "Raises" of which a docstring says nothing."""
    (node,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    assert isinstance(node, Function)
    documented = re.findall(r"^\s+\*{0,2}([a-z_][a-z0-9_]*(?:, \*{0,2}[a-z_][a-z0-9_]*)*):", text, re.MULTILINE)
    entries = {name.strip(" *") for names in documented for name in names.split(",")}
    names = [argument.arg for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
    gaps = [name for name in names if name not in ("self", "cls", *entries) and not name.startswith("_")]
    if "Raises:" not in text and any(isinstance(part, ast.Raise) and part.exc for part in _own_statements(node)):
        gaps.append("Raises")
    nothing = node.returns is None or ast.unparse(node.returns) in ("None", "NoReturn", "Self")
    nothing |= any("property" in ast.unparse(each) for each in node.decorator_list)
    says = "Returns:" in text or "Yields:" in text or re.match(r"\s*(Return|Yield|Whether|The |A |An )", text)
    return gaps if nothing or says else [*gaps, "Returns"]


def _own_statements(node: Function) -> Iterator[ast.AST]:
    """Yield what a function consists of, without the functions inside."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, Function | ast.Lambda | ast.ClassDef):
            yield child
            yield from _own_statements(child)  # type: ignore[arg-type]
