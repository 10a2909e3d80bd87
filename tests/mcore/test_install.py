"""What `megatron_2bw.install` replaces in Megatron, and that `uninstall` puts it back."""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_2bw.mcore import checks

REPLACED = """
import importlib, operator
from megatron_2bw.mcore import cpu_backend
cpu_backend.install()  # Before Megatron is imported.
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


LEAVING = """
from megatron_2bw.runtime import gloo_workers
gloo_workers.finish = lambda: print("finished")
import megatron_2bw
megatron_2bw.install()
megatron_2bw.install()
"""


@pytest.mark.parametrize(("then", "printed"), [("", "finished\n"), ("megatron_2bw.uninstall()", "")])
def test_a_process_leaves_no_thread_of_gloo_at_work(then: str, printed: str) -> None:
    ended = subprocess.run([sys.executable, "-c", LEAVING + then], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (0, printed), ended.stderr


def test_everything_is_replaced_once_and_put_back() -> None:
    ended = subprocess.run([sys.executable, "-c", REPLACED], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr


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
