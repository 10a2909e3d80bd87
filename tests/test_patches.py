"""The patches add what their script says; ``patches/patches.py check`` needs a checkout of Megatron-LM."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

PATCHES = Path(__file__).parents[1] / "patches"


@pytest.fixture(scope="module")
def patches():
    spec = importlib.util.spec_from_file_location("patches", PATCHES / "patches.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_one_patch_per_release_that_adds_these_lines_and_no_others(patches):
    assert {file.stem for file in PATCHES.glob("*.patch")} == set(patches.RELEASES)
    for release in patches.RELEASES:
        lines = (PATCHES / f"{release}.patch").read_text().splitlines(keepends=True)[2:]
        added = "".join(line[1:] for line in lines if line[0] == "+")
        assert added.strip() == patches.INSERTED.strip()
        assert not [line for line in lines if line[0] == "-"]


def test_the_commits_are_those_of_the_readme(patches):
    table = re.findall(r"\| `(\S+)\.patch` \| `(\w+)` \|", (PATCHES / "README.md").read_text())
    assert dict(table) == patches.RELEASES
