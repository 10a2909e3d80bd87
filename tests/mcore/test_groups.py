"""Process groups of our own."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from megatron_2bw.runtime.links import ONE_WAY


@pytest.fixture
def world() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_pairs_have_channels_of_their_own_where_groups_are_bound_to_a_device(
    world: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loop may give ``init_process_group`` a ``device_id``; see the warning of ProcessGroupNCCL's pointToPoint."""
    from megatron_2bw.mcore import groups

    found, original = [], dist.new_group

    def new_group(*args: object, **keywords: object) -> dist.ProcessGroup:
        found.append(world.bound_device_id)
        return original(*args, **keywords)

    monkeypatch.setattr(dist, "new_group", new_group)
    monkeypatch.setattr(groups.parallel_state, "get_pipeline_model_parallel_group", lambda: world)
    device = torch.device("cuda:0")
    world.bound_device_id = device
    groups.create_transfer_groups(timedelta(seconds=10), ONE_WAY)
    assert found == [None, None]
    assert world.bound_device_id == device
    world.bound_device_id = None
