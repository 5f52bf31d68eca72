"""Test that private names of torch are used only through private.py and private_compiler.py."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import ac_client
import autoac.profiler
import autoac.tape
from autoac.profiler.compiler import private_compiler
from autoac.tape.torch_facts import private

_PRIVATE_PART = re.compile(r"\._(?!_)")

PRIVATE = [Path(inspect.getfile(module)) for module in (private, private_compiler)]
SOURCES = [
    path
    for package in (autoac.tape, autoac.profiler, ac_client)
    for path in sorted(Path(inspect.getfile(package)).parent.rglob("*.py"))
    if path not in PRIVATE
]


def private_names(source: str) -> Iterator[str]:
    """Yield the private names of torch that `source` imports or reads from one of torch's modules."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            for name in (f"{node.module}.{alias.name}" for alias in node.names):
                if _PRIVATE_PART.search(name):
                    yield name
        elif isinstance(node, ast.Attribute):
            name = ast.unparse(node)
            if (
                re.fullmatch(r"torch\.[\w.]+", name)
                and not name.startswith("torch.ops.")
                and _PRIVATE_PART.search(name)
            ):
                yield name


def test_imports_and_attributes_of_torch_are_recognized() -> None:
    source = "from torch._C import a\nfrom torch.x import b, _c\ntorch._d\ntorch.ops.aten._op\nself._own"
    assert sorted(private_names(source)) == ["torch._C.a", "torch._d", "torch.x._c"]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_private_names_of_torch_are_imported_from_private(path: Path) -> None:
    assert list(private_names(path.read_text("utf-8"))) == []
