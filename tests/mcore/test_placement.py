"""Where ranks are put."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest


@pytest.mark.parametrize("reason", ["", "initialized", "another order", "some ranks elsewhere"])
def test_ranks_stay_where_they_are_when(reason, monkeypatch) -> None:
    from megatron_2bw.mcore.loop import placement

    environment = {"GROUP_WORLD_SIZE": "2", "GROUP_RANK": "0", "LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "1", "RANK": "1"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(placement.dist, "is_initialized", lambda: reason == "initialized")
    args = SimpleNamespace(
        rank=1,
        world_size=8 if reason == "some ranks elsewhere" else 4,
        pipeline_model_parallel_size=8 if reason == "some ranks elsewhere" else 4,
        use_tp_pp_dp_mapping=reason == "another order",
    )
    told = placement.place(args)
    assert (args.rank, os.environ["RANK"], bool(told)) == ((1, "1", False) if reason else (3, "3", True))
