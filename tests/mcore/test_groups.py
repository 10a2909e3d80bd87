"""Process groups of our own."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_2bw.runtime.links import LANES


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
    groups.create_transfer_groups(timedelta(seconds=10), LANES)
    assert bound == [None, None]


def test_nccl_is_not_told_of_groups_of_the_host(world: dist.ProcessGroup, bound: list[torch.device | None]) -> None:
    """Ranks that are not in a new group would split NCCL's communicator; those in it make one of gloo's."""
    from megatron_2bw.mcore import groups

    groups.create_host_group(world, timedelta(seconds=10), "of the host")
    assert bound == [None]


@pytest.mark.parametrize(("hard", "most"), [(600, 600), (-1, 1012)])
def test_connections_come_on_top_of_what_a_process_may_open(
    hard: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron_2bw.mcore import groups

    limits = [(500, hard)]
    monkeypatch.setattr(groups.resource, "getrlimit", lambda what: limits[-1])
    monkeypatch.setattr(groups.resource, "setrlimit", lambda what, limit: limits.append(limit))
    groups._allow_connections(512)
    assert limits[1:] == [(most, hard)]


def test_a_group_has_the_options_of_megatrons(world: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of ``--nccl-communicator-config-path`` and ``--high-priority-stream-groups``; on the host there are none."""
    from megatron_2bw.mcore import groups

    given = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    given.config.max_ctas, given.config.net_name = 4, "IB"
    made: list[dict[str, Any]] = []
    monkeypatch.setattr(dist, "get_backend_config", lambda group=None: "cpu:gloo,cuda:nccl")
    monkeypatch.setattr(dist.ProcessGroup, "_get_backend", lambda self, device: SimpleNamespace(options=given))
    monkeypatch.setattr(groups.parallel_state, "get_pipeline_model_parallel_group", lambda: world)
    monkeypatch.setattr(groups.parallel_state, "create_group", lambda ranks, **keywords: made.append(keywords))
    groups.create_transfer_groups(timedelta(seconds=10), LANES)
    groups.create_host_group(world, timedelta(seconds=10), "of the host")
    monkeypatch.undo()
    for options in (keywords["pg_options"] for keywords in made[:2]):
        config = options.config
        assert (config.max_ctas, config.net_name, options.is_high_priority_stream) == (4, "IB", True)
        assert config.min_ctas == dist.ProcessGroupNCCL.Options().config.min_ctas
        assert options is not given
    assert made[2]["pg_options"] is None


@pytest.mark.parametrize("sums_over_tensor_ranks", [False, True])
def test_whatever_an_update_waits_for_is_connected_before_the_first_batch(
    monkeypatch: pytest.MonkeyPatch, sums_over_tensor_ranks: bool
) -> None:
    """Megatron's own groups, too, over which it gathers weights: see ``_connect_all``. And nothing else."""
    from megatron_2bw.mcore import groups

    def group(name: str, size: int) -> Any:
        return type(name, (), {"size": lambda self: size, "rank": lambda self: 0, "__repr__": lambda self: name})()

    replicas, of_experts, alone = group("replicas", 2), group("of_experts", 2), group("alone", 1)
    tensor = group("tensor", 2)
    connected: list[Any] = []
    monkeypatch.setattr(groups.parallel_state, "get_tensor_model_parallel_group", lambda: tensor)
    for getter in ("pipeline_model_parallel", "data_parallel", "tensor_and_data_parallel"):
        monkeypatch.setattr(groups.parallel_state, f"get_{getter}_group", lambda **keywords: alone)
    monkeypatch.setattr(groups, "_clones", lambda mine, *args, **keywords: {(id(one),): f"our {one}" for one in mine})
    monkeypatch.setattr(groups, "_connect_all", connected.append)
    made = groups.create_update_groups(
        timedelta(seconds=10),
        tied_embeddings=False,
        sums_over_tensor_ranks=sums_over_tensor_ranks,
        counts_tokens=False,
        counts_experts_tokens=False,
        gradients=[replicas, alone],
        statistics=[],
        weights=[replicas, replicas, of_experts, alone],
    )
    assert connected == [*["our tensor"] * sums_over_tensor_ranks, "our replicas", replicas, of_experts]
    assert (made.pipeline, made.data, made.stage) == (None, None, None)
