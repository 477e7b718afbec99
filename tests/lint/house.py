"""Counts what the rules of style ask for, from the source files: `python -m tests.lint.house` prints the table.

CONTRIBUTING.md says what is wanted, and `tests/lint/test_house.py` holds the packages that have it.
What does not belong here: what ruff, mypy and import-linter can tell.
"""

from __future__ import annotations

import ast
import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCES = (ROOT / "edl", ROOT / "serving/edl_serving")

MOST_MODULES = 15  # in a folder: more have no order that a reader remembers
MOST_FILLER = 6  # of 1,000 words in docstrings, as in httpx and anyio: with more, a reader looks for what is meant
MOST_NAME_CHARS = 40  # of a test's name: longer ones do not fit beside a result in pytest's lines

FILLER = re.compile(r"\b(one|ones|each|those|whoever|whatever|nobody|somebody|anybody|everybody)\b", re.IGNORECASE)
VAGUE_NAMES = frozenset({"one", "told", "said", "those"})

Function = ast.FunctionDef | ast.AsyncFunctionDef
Documented = Function | ast.ClassDef | ast.Module


def modules(package: str = "") -> Iterator[tuple[Path, ast.Module]]:
    """Yield the parsed modules of `edl.discovery` and the like; of all packages without a name."""
    for root in SOURCES:
        for path in sorted(root.rglob("*.py")):
            name = ".".join(path.relative_to(root.parent).with_suffix("").parts).removesuffix(".__init__")
            if not package or name == package or name.startswith(f"{package}."):
                yield path, ast.parse(path.read_text())


def place(path: Path, node: ast.stmt | ast.expr | ast.arg | None = None) -> str:
    """Return `edl/errors.py:17`."""
    return str(path.relative_to(ROOT)) + (f":{node.lineno}" if node is not None else "")


def repeated_classes() -> dict[str, list[str]]:
    """Return the public classes of which another module has one of the same name, with their places."""
    places: dict[str, list[str]] = defaultdict(list)
    for path, tree in modules():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(place(path, node))
    return {name: found for name, found in sorted(places.items()) if len(found) > 1}


def filler_per_1000_words(package: str = "") -> float:
    """Return how many of 1,000 words in docstrings stand for something that is not named."""
    words = fillers = 0
    for _, tree in modules(package):
        for node in ast.walk(tree):
            text = ast.get_docstring(node) if isinstance(node, Documented) else None
            words += len((text or "").split())
            fillers += len(FILLER.findall(text or ""))
    return 1000 * fillers / max(words, 1)


def vague_names(package: str = "") -> list[str]:
    """Return the places of variables and parameters called `one`, `told`, `said` or `those`."""
    found = []
    for path, tree in modules(package):
        for node in ast.walk(tree):
            stored = isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in VAGUE_NAMES
            if stored or (isinstance(node, ast.arg) and node.arg in VAGUE_NAMES):
                assert isinstance(node, ast.Name | ast.arg)
                found.append(place(path, node))
    return found


def joint_assignments(package: str = "") -> list[str]:
    """Return the places of `self.a, self.b = ...`."""
    return [
        place(path, node)
        for path, tree in modules(package)
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Tuple)
        and sum(isinstance(part, ast.Attribute) for part in node.targets[0].elts) > 1
    ]


def bare_constants(package: str = "") -> tuple[list[str], int]:
    """Return the places of numeric module constants without a reason beside, above or below, and the number of all."""
    bare, count = [], 0
    for path, tree in modules(package):
        lines = path.read_text().splitlines()
        for node, following in zip(tree.body, [*tree.body[1:], None], strict=True):
            if not _is_numeric_constant(node):
                continue
            count += 1
            last = node.end_lineno or node.lineno
            below = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
            beside = "#" in lines[last - 1]
            above = node.lineno > 1 and lines[node.lineno - 2].startswith("#")
            if not (below or beside or above):
                bare.append(place(path, node))
    return bare, count


def _is_numeric_constant(node: ast.stmt) -> bool:
    if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
        return False
    target = node.targets[0] if isinstance(node, ast.Assign) else node.target
    names = target.elts if isinstance(target, ast.Tuple) else [target]
    parts = list(ast.walk(node.value))
    allowed = ast.Constant | ast.BinOp | ast.UnaryOp | ast.Tuple | ast.operator | ast.unaryop | ast.Load
    numbers = [type(part.value) in (int, float) for part in parts if isinstance(part, ast.Constant)]
    return (
        all(isinstance(name, ast.Name) and name.id.isupper() for name in names)
        and all(isinstance(part, allowed) for part in parts)
        and bool(numbers)
        and all(numbers)
    )


def crowded_folders() -> dict[str, int]:
    """Return folders with more than `MOST_MODULES` modules, and how many they have."""
    counts = Counter(place(path.parent) for path, _ in modules() if path.name != "__init__.py")
    counts.update(place(path.parent) for path in (ROOT / "tests").rglob("test_*.py"))
    return {folder: count for folder, count in counts.most_common() if count > MOST_MODULES}


def test_names() -> list[str]:
    """Return the names of all test functions."""
    trees = (ast.parse(path.read_text()) for path in sorted((ROOT / "tests").rglob("test_*.py")))
    return [
        node.name
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, Function) and node.name.startswith("test_")
    ]


class Exported:
    """A function, method or constructor that users and implementers call, and what its docstring leaves out.

    Attributes:
        where: its place.
        parameters: whether it has any.
        silent: the parameters without an entry under `Args:` (`Attributes:` of a dataclass).
        answers: whether it returns or raises something.
        mute: "Returns" and "Raises", as far as the docstring says nothing of them.
    """

    def __init__(self, path: Path, node: Function, owner: ast.ClassDef | None) -> None:
        self.where = f"{place(path, node)} {owner.name + '.' if owner else ''}{node.name}"
        constructor = node.name == "__init__"
        text = (ast.get_docstring(node) or "") + (ast.get_docstring(owner) or "" if owner and constructor else "")
        names = [argument.arg for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
        names = [name for name in names if name not in ("self", "cls") and not name.startswith("_")]
        self.parameters = bool(names)
        self.silent = sorted(set(names) - _entries(text))
        raises = any(isinstance(part, ast.Raise) and part.exc is not None for part in _own_statements(node))
        is_property = any("property" in ast.unparse(each) for each in node.decorator_list)
        nothing = node.returns is None or ast.unparse(node.returns) in ("None", "NoReturn", "Self") or constructor
        first = text.partition("\n")[0]
        says_returns = "Returns:" in text or "Yields:" in text or re.match(r"(Return|Yield|Whether|The |A |An )", first)
        self.answers = raises or not (nothing or is_property)
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


def main() -> None:
    """Print the table of CONTRIBUTING.md, and the same by package."""
    from tests.lint.test_public_names import PUBLIC

    calls = exported(PUBLIC)
    bare, constants = bare_constants()
    names = test_names()
    asked, answering = [call for call in calls if call.parameters], [call for call in calls if call.answers]
    print(f"{len(repeated_classes())} public class names are defined twice or more")
    print(f"{filler_per_1000_words():.0f} of 1,000 words in docstrings name nothing")
    print(f"{len(vague_names())} variables are called one, told, said or those")
    print(f"{sum(not call.silent for call in asked)} of {len(asked)} exported callables document all parameters")
    print(f"{sum(not call.mute for call in answering)} of {len(answering)} say what they return and raise")
    print(f"{len(bare)} of {constants} numeric module constants have no reason")
    print(f"{len(joint_assignments())} lines assign several attributes")
    print(f"more than {MOST_MODULES} modules lie in: {crowded_folders()}")
    long = sum(len(name) > MOST_NAME_CHARS for name in names)
    median = statistics.median(map(len, names))
    print(f"{long} of {len(names)} tests' names have over {MOST_NAME_CHARS} characters, {median:.0f} is the median")
    print("package: filler words per 1,000, vague names, joint assignments, constants without a reason")
    packages = {".".join(path.relative_to(root.parent).parts[:2]) for root in SOURCES for path in root.iterdir()}
    for package in sorted(name for name in packages if _is_module(name) and "." in name):
        figures = len(vague_names(package)), len(joint_assignments(package)), len(bare_constants(package)[0])
        print(f"  {package}: {filler_per_1000_words(package):.0f}", *figures, sep=", ")


if __name__ == "__main__":
    main()
