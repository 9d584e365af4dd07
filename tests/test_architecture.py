"""Which device runs is the operators' business: nothing above `kernels` branches on it. No private name is shared, and
nothing but the registry lists mechanisms.

A mechanism, a layer or a model asks what it wants to know (`kernels.values.readable`: may the host look at this mask?)
or calls an operator, which picks its kernel. What merely carries out a user's choice of a device, or measures one, may
look at it. The layers of imports are checked by import-linter (`make check`).
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import subquad

SOURCE = Path(subquad.__file__).parent
MAY_LOOK = ("kernels", "cli", "studies", "testing", "bench.py", "bench_steps.py")
QUESTIONS = {"is_host", "is_cuda", "is_cpu", "is_mps", "is_xpu"}  # not is_meta: what has no contents is nowhere
DEVICES = {"cpu", "cuda", "meta", "mps", "xpu", "hip"}


def branches(code: str) -> Iterator[ast.AST]:
    """Where code asks for a device. To hand `x.device.type` on, to torch.autocast for example, is no question."""
    tree = ast.parse(code)
    given = {id(x) for call in ast.walk(tree) if isinstance(call, ast.Call) for x in call.args}
    for node in ast.walk(tree):
        name = {ast.Name: "id", ast.Attribute: "attr", ast.alias: "name"}.get(type(node), "")
        compared = [node.left, *node.comparators] if isinstance(node, ast.Compare) else []
        if (
            getattr(node, name, None) in QUESTIONS
            or (is_kind(node) and id(node) not in given)
            or any(isinstance(x, ast.Constant) and x.value in DEVICES for x in compared)
        ):
            yield node


def is_kind(node: ast.AST) -> bool:
    """`device.type`, or the same of anything that has a device."""
    return isinstance(node, ast.Attribute) and node.attr == "type" and ast.unparse(node.value).endswith("device")


def test_nothing_outside_the_operators_branches_on_a_device():
    found = []
    for path in sorted(SOURCE.rglob("*.py")):
        place = path.relative_to(SOURCE)
        if place.parts[0] not in MAY_LOOK:
            found += [f"{place}:{node.lineno}: {ast.unparse(node)}" for node in branches(path.read_text())]
    assert not found, "move the question behind an operator of `kernels`:\n" + "\n".join(found)


@pytest.mark.parametrize(
    "code",
    [
        "if devices.is_host(q): pass", "from subquad.kernels.devices import is_host", "y = 1 if x.is_cuda else 2",
        "if q.device.type == 'cpu': pass", "kind = q.device.type", "f(device.type != 'cuda')",
        "a = str(x.device) == 'cpu'",
    ],
)  # fmt: skip
def test_a_branch_on_a_device_is_found(code):
    assert list(branches(code))


@pytest.mark.parametrize("code", ["torch.autocast(q.device.type, enabled=False)", "x.to(y.device)", "task.type == 'a'"])
def test_what_is_no_branch_is_left_alone(code):
    assert not list(branches(code))


def private_names(code: str) -> Iterator[str]:
    """Names with an underscore that code takes from other modules of the package, imported or as `module._name`."""
    tree, modules = ast.parse(code), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "subquad":
            modules |= {alias.asname or alias.name for alias in node.names if alias.name.islower()}  # no classes
            yield from (f"{node.module}.{alias.name}" for alias in node.names if is_private(alias.name))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr) and ast.unparse(node.value) in modules:
            yield ast.unparse(node)


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def test_no_module_uses_a_private_name_of_another():
    found = {str(path.relative_to(SOURCE)): [*private_names(path.read_text())] for path in SOURCE.rglob("*.py")}
    found = {place: names for place, names in found.items() if names}
    assert not found, f"give these names a public home, in a module named for what it holds: {found}"


@pytest.mark.parametrize(
    "code", ["from subquad.kernels.a import b, _c", "from subquad.kernels import a\na._b()", "from subquad import _a"]
)
def test_a_private_name_of_another_module_is_found(code):
    assert list(private_names(code))


@pytest.mark.parametrize("code", ["from torch import _C", "def _a(): pass\n_a()", "from subquad import a\na.__doc__"])
def test_other_underscores_are_left_alone(code):
    assert not list(private_names(code))


# What an experiment compares, an example in a help text, and the plans of a mixture, which bear the same names.
PLACES = ("attention/registry.py", "attention/combiner_mixture.py", "cli/compare.py", "peer_modules.py")
MAY_LIST = (*PLACES, "studies", "reproductions")


def lists_of_mechanisms(code: str) -> Iterator[str]:
    """Texts, tuples, lists, sets and dictionaries that name three mechanisms or more; docstrings are left out."""
    names, tree = set(subquad.available()), ast.parse(code)
    said = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if id(node) not in said and isinstance(node, ast.Constant | ast.Tuple | ast.List | ast.Set | ast.Dict):
            texts = [x.value for x in ast.walk(node) if isinstance(x, ast.Constant) and isinstance(x.value, str)]
            if len(names & {word for text in texts for word in re.findall(r"[a-z0-9-]+", text)}) > 2:
                yield f"{node.lineno}: {ast.unparse(node)[:80]}"


def test_no_file_but_the_registry_lists_mechanisms_by_name():
    found = {}
    for path in sorted(SOURCE.rglob("*.py")):
        place = path.relative_to(SOURCE).as_posix()
        if not place.startswith(MAY_LIST):
            found |= {place: lines} if (lines := [*lists_of_mechanisms(path.read_text())]) else {}
    assert not found, f"declare it on the classes of the mechanisms: {found}"


@pytest.mark.parametrize("code", ["A = 'full, star and sbm:clusters=4'", "f(['full', 'star', 'combiner-fixed'])"])
def test_a_list_of_mechanisms_is_found(code):
    assert list(lists_of_mechanisms(code))


@pytest.mark.parametrize("code", ["'full, star and sbm'", "A = ('full', 'star')", "A = 'starry, fuller, sbms'"])
def test_what_is_no_list_of_mechanisms_is_left_alone(code):
    assert not list(lists_of_mechanisms(code))


def test_the_modules_with_exceptions_exist():
    assert all((SOURCE / place).exists() for place in (*MAY_LOOK, *MAY_LIST))
