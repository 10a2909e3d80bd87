"""Who imports whom: schedules and the planner need no torch, the runtime no Megatron; no layer one above it."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "megatron_2bw"


def modules_of(folder: str) -> list[str]:
    files = (file.relative_to(PACKAGE.parent).with_suffix("") for file in (PACKAGE / folder).rglob("[!_]*.py"))
    return sorted(".".join(file.parts) for file in files)


def loaded_by(modules: list[str], unwanted: tuple[str, ...]) -> list[str]:
    """Which of the ``unwanted`` packages a fresh interpreter has loaded after importing ``modules``."""
    code = f"import sys, {', '.join(modules)}; print(*sorted({set(unwanted)!r} & sys.modules.keys()))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    return result.stdout.split()


OUTSIDE = ("torch", "numpy", "megatron")
RUNTIME, PLANNER, ADAPTER = (f"megatron_2bw.{folder}" for folder in ("runtime", "planner", "mcore"))
LAYERS = {
    "schedule": (modules_of("schedule"), (*OUTSIDE, RUNTIME, PLANNER, ADAPTER)),
    "planner": (modules_of("planner"), (*OUTSIDE, RUNTIME, ADAPTER)),
    "runtime": (modules_of("runtime"), ("megatron", PLANNER, ADAPTER)),
    "cli": (["megatron_2bw.cli"], (*OUTSIDE, ADAPTER)),
    "package": (["megatron_2bw"], OUTSIDE),
}


@pytest.mark.parametrize("layer", LAYERS)
def test_a_layer_does_not_load_what_is_above_it(layer: str):
    modules, unwanted = LAYERS[layer]
    assert modules
    assert loaded_by(modules, unwanted) == []


def test_the_check_sees_what_is_loaded():
    assert loaded_by(["json", "xml"], ("json", "xml", "torch")) == ["json", "xml"]


FOLDERS = {
    "schedule": ("systems", "validation", "pictures", "commands"),
    "planner": (
        *("bash", "specs", "flag_table", "pipeline", "cost", "memory", "papers"),
        *("search", "flags", "report", "rows", "measure", "commands"),
    ),
    "mcore": ("updates", "stages", "checkpoints", "cpu", "monitoring", "loop"),
}


def imported_folders(layer: str, folder: str) -> set[str]:
    """Which other folders of ``layer`` the files of ``folder`` import from."""
    trees = (ast.parse(file.read_text()) for file in (PACKAGE / layer / folder).rglob("*.py"))
    nodes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    modules = ((getattr(node, "module", None), alias.name) for node in nodes for alias in node.names)
    names = (f"{module}.{name}" if module else name for module, name in modules)
    before = f"megatron_2bw.{layer}."
    parts = (name.removeprefix(before).split(".")[0] for name in names if name.startswith(before))
    return set(parts) & set(FOLDERS[layer]) - {folder}


@pytest.mark.parametrize(("layer", "folder"), [(layer, folder) for layer in FOLDERS for folder in FOLDERS[layer]])
def test_a_folder_imports_only_from_those_before_it(layer: str, folder: str):
    assert imported_folders(layer, folder) <= set(FOLDERS[layer][: FOLDERS[layer].index(folder)])


@pytest.mark.parametrize("layer", FOLDERS)
def test_these_are_the_folders(layer: str):
    assert {file.parent.name for file in (PACKAGE / layer).glob("*/__init__.py")} == set(FOLDERS[layer])
