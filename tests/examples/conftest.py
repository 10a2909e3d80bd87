"""Examples and scripts are files that users run, not modules of a package: load them by path."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def root() -> Path:
    return ROOT


@pytest.fixture(scope="session")
def run_on_two() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run a script, by its path in the repository, in two processes."""

    def run(script: str, *flags: str) -> subprocess.CompletedProcess[str]:
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])  # May hold a Megatron.
        environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        command = [*torchrun, str(ROOT / script), *flags]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)

    return run


@pytest.fixture(scope="session")
def load() -> Callable[[str], ModuleType]:
    """Load a script by its path in the repository, without running it."""

    def load_script(path: str) -> ModuleType:
        spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module  # Dataclasses look their module up.
        spec.loader.exec_module(module)
        return module

    return load_script
