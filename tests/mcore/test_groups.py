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


@pytest.fixture
def bound(world: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[torch.device | None]]:
    """Where a loop gave ``init_process_group`` a ``device_id``: what new groups are bound to."""
    found, original = [], dist.new_group

    def new_group(*args: object, **keywords: object) -> dist.ProcessGroup:
        found.append(world.bound_device_id)
        return original(*args, **keywords)

    monkeypatch.setattr(dist, "new_group", new_group)
    device = torch.device("cuda:0")
    world.bound_device_id = device
    yield found
    assert world.bound_device_id == device
    world.bound_device_id = None


def test_pairs_have_channels_of_their_own(
    world: dist.ProcessGroup, bound: list[torch.device | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """See the warning of ProcessGroupNCCL's pointToPoint."""
    from megatron_2bw.mcore import groups

    monkeypatch.setattr(groups.parallel_state, "get_pipeline_model_parallel_group", lambda: world)
    groups.create_transfer_groups(timedelta(seconds=10), ONE_WAY)
    assert bound == [None, None]


def test_nccl_is_not_told_of_groups_of_the_host(world: dist.ProcessGroup, bound: list[torch.device | None]) -> None:
    """Ranks that are not in a new group would split NCCL's communicator; those in it make one of gloo's."""
    from megatron_2bw.mcore import groups

    groups.create_host_group(world, timedelta(seconds=10), "of the host")
    assert bound == [None]
