"""The repository's own rules: light imports, documented parameters, generated files up to date, a complete wheel."""

from __future__ import annotations

import ast
import email
import importlib.metadata
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import edl
from tests.lint.test_public_names import PUBLIC

ROOT = Path(__file__).resolve().parents[2]
SOURCES = (ROOT / "edl", ROOT / "serving/edl_serving")
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
    found = exported({module: (PUBLIC | CONTRACTS)[module]})
    silent = {call.where: call.silent for call in found if call.silent}
    mute = {call.where: call.mute for call in found if call.mute}
    assert not silent, f"parameters without an entry under Args: {silent}"
    assert not mute, f"docstrings that leave out what is returned or raised: {mute}"


class Exported:
    """A function, method or constructor that users and implementers call, and what its docstring leaves out.

    Attributes:
        where: its place.
        silent: the parameters without an entry under `Args:` (`Attributes:` of a dataclass).
        mute: "Returns" and "Raises", as far as the docstring says nothing of them.
    """

    def __init__(self, path: Path, node: Function, owner: ast.ClassDef | None) -> None:
        self.where = f"{path.relative_to(ROOT)}:{node.lineno} {owner.name + '.' if owner else ''}{node.name}"
        constructor = node.name == "__init__"
        text = (ast.get_docstring(node) or "") + (ast.get_docstring(owner) or "" if owner and constructor else "")
        names = [argument.arg for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
        names = [name for name in names if name not in ("self", "cls") and not name.startswith("_")]
        self.silent = sorted(set(names) - _entries(text))
        raises = any(isinstance(part, ast.Raise) and part.exc is not None for part in _own_statements(node))
        is_property = any("property" in ast.unparse(each) for each in node.decorator_list)
        nothing = node.returns is None or ast.unparse(node.returns) in ("None", "NoReturn", "Self") or constructor
        first = text.partition("\n")[0]
        says_returns = "Returns:" in text or "Yields:" in text or re.match(r"(Return|Yield|Whether|The |A |An )", first)
        self.mute = ["Raises"] * (raises and "Raises:" not in text)
        self.mute += ["Returns"] * (not nothing and not is_property and not says_returns)


def exported(names: dict[str, list[str]]) -> list[Exported]:
    """Return the callables behind public names: functions, and constructors and public methods of classes.

    Args:
        names: by public module.
    """
    found: list[Exported] = []
    for module, offered in names.items():
        for name in offered:
            path, node = _definition(module, name)
            if isinstance(node, Function):
                found.append(Exported(path, node, None))
            elif isinstance(node, ast.ClassDef):
                found += [
                    Exported(path, part, node)
                    for part in node.body
                    if isinstance(part, Function)
                    and (part.name == "__init__" or not part.name.startswith("_"))
                    # What overrides a documented method has its docstring there.
                    and not (node.bases and part.name != "__init__" and not ast.get_docstring(part))
                ]
    return found


def _definition(module: str, name: str) -> tuple[Path, ast.stmt | None]:
    """Follow imports from a public module to where a name is defined; None for what is neither function nor class."""
    relative = module.replace(".", "/")
    roots = [root.parent / relative for root in SOURCES]
    path = next(path for root in roots for path in (root.with_suffix(".py"), root / "__init__.py") if path.is_file())
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, Function | ast.ClassDef) and node.name == name:
            return path, node
        if isinstance(node, ast.ImportFrom) and node.module not in (None, module) and _is_module(node.module or ""):
            for alias in node.names:
                if name == (alias.asname or alias.name):
                    return _definition(node.module or "", alias.name)
    return path, None


def _is_module(name: str) -> bool:
    relative = name.replace(".", "/")
    return any(
        (root.parent / f"{relative}.py").is_file() or (root.parent / relative / "__init__.py").is_file()
        for root in SOURCES
    )


def _entries(text: str) -> set[str]:
    """Return the names that have an entry in a docstring of Google's style: `name: words` or `a, b: words`."""
    found = re.findall(r"^\s+\*{0,2}([a-z_][a-z0-9_]*(?:, \*{0,2}[a-z_][a-z0-9_]*)*):", text, re.MULTILINE)
    return {name.strip(" *") for names in found for name in names.split(",")}


def _own_statements(node: Function) -> Iterator[ast.AST]:
    """Yield what a function consists of, without the functions inside."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, Function | ast.Lambda | ast.ClassDef):
            yield child
            yield from _own_statements(child)  # type: ignore[arg-type]
