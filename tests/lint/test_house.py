"""The house's own rules: quick imports, layers, generated files up to date, a complete wheel, one version."""

from __future__ import annotations

import ast
import email
import importlib.metadata
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import edl
from tests.lint import house
from tests.lint.test_public_names import PUBLIC

ROOT = Path(__file__).resolve().parents[2]
CLEAN = {name: value for name, value in os.environ.items() if not name.startswith("EDL_")}


def python(*arguments: str) -> str:
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=ROOT, env=CLEAN, capture_output=True, text=True, timeout=110, check=True).stdout


def test_importing_edl_is_quick() -> None:
    """The best of several, since the machine may be busy; an interpreter's own start does not count."""
    code = "import time; t = time.perf_counter(); import edl; print(time.perf_counter() - t)"
    assert min(float(python("-c", code)) for _ in range(5)) < 0.3


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


def test_the_layers_hold() -> None:
    done = subprocess.run(
        [Path(sys.executable).with_name("lint-imports")], cwd=ROOT, capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("name", ["etcd", "keda/external_scaler", "kserve", "master", "store"])
def test_generated_protocol_is_up_to_date(tmp_path: Path, name: str) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
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


def test_wheel_has_exactly_the_sources(tmp_path: Path) -> None:
    python("-m", "pip", "wheel", "-qq", "--no-deps", "--no-build-isolation", "--wheel-dir", str(tmp_path), ".")
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        metadata = email.message_from_bytes(archive.read(f"elastic_distill-{edl.__version__}.dist-info/METADATA"))
        entry_points = archive.read(f"elastic_distill-{edl.__version__}.dist-info/entry_points.txt").decode()
    sources = _sources(ROOT / "edl") | _sources(ROOT / "serving/edl_serving")
    assert sources <= names, f"missing in the wheel: {sorted(sources - names)}"
    others = {name for name in names - sources if f"elastic_distill-{edl.__version__}.dist-info/" not in name}
    assert others == set()
    compiled = {f"edl/protocol/{name}.binpb" for name in ("etcd", "keda/external_scaler", "kserve", "master", "store")}
    assert {"edl/py.typed", "edl_serving/py.typed"} | compiled <= names
    assert metadata["License-Expression"] == "Apache-2.0"
    assert f"elastic_distill-{edl.__version__}.dist-info/licenses/LICENSE" in names
    assert "edl = edl.cli:main" in entry_points
    assert metadata.get_payload().strip(), "the README is the description"


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


# What follows is counted by `python -m tests.lint.house`; CONTRIBUTING.md has the table.

TIDY = ("edl", "edl_serving")
CONTRACTS = {
    "edl.background": ["BackgroundLoop", "start_call"],
    "edl.backoff": ["Backoff"],
    "edl.discovery.balance": ["balance"],
    "edl.discovery.registry": ["Registration", "Registry", "Watch"],
    "edl.discovery.store": ["Election", "Lease", "Store", "StoreWatch"],
}
"""Beside `PUBLIC`, what others implement or build on."""
REPEATED = {"Checkpointer", "DistillLoss"}
"""Class names of which another module has the same: Paddle's face has the public names that PyTorch's has."""


def test_a_class_name_means_one_thing() -> None:
    repeated = house.repeated_classes()
    new = {name: places for name, places in repeated.items() if name not in REPEATED}
    assert not new, f"these classes need names of their own: {new}"


def test_folders_have_room() -> None:
    crowded = house.crowded_folders()
    assert not crowded, f"more than {house.MOST_MODULES} modules, so make folders: {crowded}"


@pytest.mark.parametrize("package", TIDY)
def test_variables_name_what_they_hold(package: str) -> None:
    assert not house.vague_names(package)


@pytest.mark.parametrize("package", TIDY)
def test_docstrings_name_their_subjects(package: str) -> None:
    found = house.filler_per_1000_words(package)
    assert found <= house.MOST_FILLER, f"{found:.0f} of 1,000 words are like those of {house.FILLER.pattern}"


@pytest.mark.parametrize("package", TIDY)
def test_attributes_are_assigned_one_by_one(package: str) -> None:
    assert not house.joint_assignments(package)


@pytest.mark.parametrize("package", TIDY)
def test_numeric_constants_have_reasons(package: str) -> None:
    bare, _ = house.bare_constants(package)
    assert not bare, "say why that value, and what breaks with another"


@pytest.mark.parametrize("module", sorted(name for name in (PUBLIC | CONTRACTS) if name.startswith(TIDY)))
def test_exported_callables_are_documented(module: str) -> None:
    found = house.exported({module: (PUBLIC | CONTRACTS)[module]})
    silent = {call.where: call.silent for call in found if call.silent}
    mute = {call.where: call.mute for call in found if call.mute}
    assert not silent, f"parameters without an entry under Args: {silent}"
    assert not mute, f"docstrings that leave out what is returned or raised: {mute}"


def test_groups_of_tests_name_files() -> None:
    """A file that was moved would run beside others, though it must not."""
    from tests import conftest

    for name in (*conftest.SERIAL, *conftest.ALONE, *conftest.LONG):
        assert (ROOT / "tests" / name).exists(), f"tests/conftest.py names tests/{name}, which is not there"


def test_tests_have_short_names() -> None:
    """The detail goes into the message of an assertion, or into a docstring."""
    long = [
        f"{path.relative_to(ROOT)}: {node.name}"
        for path in sorted((ROOT / "tests").rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.name.startswith("test_")
        and len(node.name) > house.MOST_NAME_CHARS
    ]
    assert not long, f"more than {house.MOST_NAME_CHARS} characters: {long}"
