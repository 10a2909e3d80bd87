"""Exits that ranks ask each other about."""

from __future__ import annotations

import time

import torch


def test_a_rank_does_not_end_while_others_are_answered() -> None:
    from megatron_2bw.mcore.exits import ExitRequests
    from megatron_2bw.runtime.background import Background

    exits, answered = ExitRequests.__new__(ExitRequests), []
    exits._background = Background(torch.device("cpu"), "test of exits")
    exits._before = {}
    exits._gathered = lambda wish: (time.sleep(0.5), answered.append(wish))
    exits.gather("signal", True)
    exits.close()
    assert answered == [True]
