"""What `megatron_2bw.install` replaces in Megatron, and that `uninstall` puts it back."""

from __future__ import annotations

import argparse
import ast
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import MagicMock

import pytest

from megatron_2bw.mcore.install import HOOKS
from megatron_2bw.mcore.loop import checks, wrappers
from megatron_2bw.mcore.used import USED

RUNNER = """
import json, os, sys, torch
cuda = torch.Tensor.cuda
from megatron_2bw.mcore.cpu import backend as cpu_backend
cpu_backend.install()  # Before Megatron is imported.
from megatron.core import timers
from megatron.core.datasets import utils
from megatron.training import training
train = training.train
for name, program in json.load(sys.stdin).items():
    if os.fork() == 0:
        exec(program)
        sys.exit()
    print(json.dumps([name, os.wait()[1]]), flush=True)
"""
"""Programs from standard input, each in a process of its own, after one import of Megatron."""

REPLACED = """
import importlib, operator
import megatron_2bw
from megatron_2bw.mcore.install import HOOKS
from megatron_2bw.mcore.symbols import is_relied_on

def bindings():
    return [
        operator.attrgetter(hook.name)(importlib.import_module(hook.module)) for hook in HOOKS if is_relied_on(hook)
    ]

before = bindings()
megatron_2bw.install()
installed = bindings()
assert len(installed) > 20
assert not any(map(operator.is_, before, installed)), "something is not replaced"
megatron_2bw.install()
assert all(map(operator.is_, installed, bindings())), "twice"
megatron_2bw.uninstall()
assert all(map(operator.is_, before, bindings())), "something stays"
"""

CHANGED = """
cpu_backend.uninstall()
{change}
import megatron_2bw
try:
    megatron_2bw.install()
except RuntimeError as error:
    assert type(error).__name__ == "UnsupportedMegatronError"
    assert {message!r} in str(error), error
    assert "works with megatron-core" in str(error), error
else:
    sys.exit("it is not refused")
assert torch.Tensor.cuda is cuda, "the CPU backend stays"
assert training.train is train, "a hook is in place"
"""
CHANGES = {
    "del training.evaluate": "megatron.training.training.evaluate is missing",
    "timers.Timer.set_elapsed = lambda self, seconds: None": (
        "megatron.core.timers.Timer.set_elapsed no longer takes value in megatron-core"
    ),
    "del utils.compile_helpers": "what runs without a GPU is missing",
}
"""To Megatron, and what is said of each."""


LEAVING = """
from megatron_2bw.runtime import gloo_workers
gloo_workers.finish = lambda: print("finished")
import megatron_2bw
megatron_2bw.install()
megatron_2bw.install()
"""


@pytest.mark.parametrize("then", ["", "megatron_2bw.uninstall()"])
def test_a_process_leaves_no_thread_of_gloo_at_work(then: str) -> None:
    ended = subprocess.run([sys.executable, "-c", LEAVING + then], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (0, "finished\n"), ended.stderr


@pytest.fixture(scope="module")
def said() -> dict[str, str]:
    """How each program ended and what all of them said; nothing where all was well."""
    programs = {"replaced": REPLACED}
    programs |= {change: CHANGED.format(change=change, message=message) for change, message in CHANGES.items()}
    command = [sys.executable, "-c", RUNNER]
    ended = subprocess.run(command, input=json.dumps(programs), capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    statuses = map(json.loads, ended.stdout.splitlines())
    return {name: f"status {status}\n{ended.stderr}" if status else "" for name, status in statuses}


def test_everything_is_replaced_once_and_put_back(said: dict[str, str]) -> None:
    assert said["replaced"] == ""


@pytest.mark.parametrize("change", CHANGES)
def test_a_megatron_that_lacks_a_name_is_refused_and_left_as_it_was(change: str, said: dict[str, str]) -> None:
    assert said[change] == ""


def test_a_run_that_was_left_is_forgotten_where_the_next_one_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also under Megatron's own schedule, and before it copies weights, which the one before has to give back."""
    left = MagicMock()

    def build(config: object, chunks: list[object]) -> str:
        assert left.forget.called
        return "Megatron's"

    monkeypatch.setattr(wrappers, "_schedule", lambda: "megatron")
    monkeypatch.setattr(wrappers.active, "session", left)
    assert wrappers.get_optimizer(build, None, []) == "Megatron's"
    assert wrappers.active.session is None


def test_every_name_that_is_imported_from_megatron_is_checked() -> None:
    checked = {(used.module, used.name.partition(".")[0]) for used in (*HOOKS, *USED)}
    files = set((ROOT / "megatron_2bw" / "mcore").rglob("*.py")) - {ROOT / "megatron_2bw" / "mcore" / "profile.py"}
    imported = set().union(*map(_imported, files))
    assert len(imported) > 50
    assert imported <= checked | {("megatron.core.package_info", "__version__")}


def _imported(file: Path) -> set[tuple[str, str]]:
    """Modules and names: ``from module import name``, and ``module.name`` after ``from package import module``."""
    tree = ast.parse(file.read_text())
    names, modules = set(), {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module.split(".")[0] == "megatron":
            for one in node.names:
                whole = f"{node.module}.{one.name}"
                if whole in {used.module for used in USED} or _is_module(whole):
                    modules[one.asname or one.name] = whole
                else:
                    names.add((node.module, one.name))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
            names.add((modules[node.value.id], node.attr))
    return names


def _is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # Its package is a module.
        return False


@pytest.mark.parametrize("given", [["--pipeline-schedule", "2bw"], ["--pipeline-schedule=2bw"]])
def test_a_yaml_file_that_would_hide_the_schedule_is_refused(
    given: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", "--yaml-cfg", "run.yaml", *given])
    with pytest.raises(SystemExit) as refusal:
        checks.parsed(argparse.Namespace)
    assert refusal.value.code == 2
    assert "does not work with --yaml-cfg, which replaces all other flags; use flags" in capsys.readouterr().err


def test_a_yaml_file_alone_is_megatrons(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", "--yaml-cfg", "run.yaml"])
    assert checks.parsed(lambda: argparse.Namespace(lr=1)) == argparse.Namespace(lr=1)


def test_a_script_finds_the_megatron_beside_it(tmp_path: Path) -> None:
    """As ``python SCRIPT`` would, wherever it is started from, though hooks come before the script."""
    checkout, elsewhere = tmp_path / "checkout", tmp_path / "elsewhere"
    checkout.mkdir()
    elsewhere.mkdir()
    installed, *_ = importlib.util.find_spec("megatron").submodule_search_locations
    (checkout / "megatron").symlink_to(installed)
    (checkout / "script.py").write_text("import sys, megatron.core; print(megatron.core.__file__, *sys.path)")
    core, first, *others = _launched(checkout / "script.py", elsewhere).split()
    assert core == str(checkout / "megatron" / "core" / "__init__.py")
    assert first == str(checkout)
    assert str(elsewhere) not in others


def test_a_safe_path_stays_as_it_is(tmp_path: Path) -> None:
    """``PYTHONSAFEPATH``: neither the working directory nor that of the script is looked into."""
    (tmp_path / "script.py").write_text("import sys; print(*sys.path)")
    found = _launched(tmp_path / "script.py", tmp_path, PYTHONSAFEPATH="1").split()
    assert found[0] == str(ROOT)
    assert str(tmp_path) not in found


ROOT = Path(__file__).parents[2]


def _launched(script: Path, folder: Path, **variables: str) -> str:
    """The last line that it prints, started in ``folder``."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"PYTHONPATH": path} | variables
    command = [sys.executable, "-m", "megatron_2bw", str(script)]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.splitlines()[-1]
