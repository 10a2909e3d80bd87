"""A run whose ranks believe to be on nodes of two, as torchrun would tell them."""

from __future__ import annotations

import os
from pathlib import Path

from .case import Case
from .worker import install, set_environment, train

PER_NODE = 2


def main(case: Case, slot: int, port: int, folder: Path) -> None:
    set_environment(slot, case.ranks, port)
    node, local = divmod(slot, PER_NODE)
    nodes = case.ranks // PER_NODE
    os.environ.update(GROUP_WORLD_SIZE=str(nodes), GROUP_RANK=str(node))
    os.environ.update(LOCAL_WORLD_SIZE=str(PER_NODE), LOCAL_RANK=str(local))
    install(case)
    train(case, slot, folder)
