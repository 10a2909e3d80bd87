"""Exits that ranks ask each other about."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
import torch.distributed as dist


def test_a_rank_does_not_end_while_others_are_answered(
    world: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron_2bw.mcore.loop.exits import ExitRequests

    exits, answered = ExitRequests(timedelta(seconds=10)), []
    monkeypatch.setattr(dist, "all_gather", lambda *args, **keywords: (time.sleep(0.5), answered.append(True)))
    exits.gather("signal", True)
    exits.close()
    assert answered == [True]
