"""Process groups of our own, so that our traffic never meets Megatron's."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import resource
from array import array
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_2bw.runtime.links import Lane, backend_of


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferGroups:
    """Groups of one pipeline's ranks."""

    ranks: list[int]
    """Global rank of each stage."""
    lanes: Mapping[Lane, dist.ProcessGroup]

    @property
    def forward(self) -> dist.ProcessGroup:
        """That of activations on their way to higher ranks; every schedule has it."""
        return self.lanes[Lane(True, True)]


@dataclass(frozen=True, slots=True, kw_only=True)
class MirrorGroups:
    """Groups of one pipeline's ranks for what passes between rank r and rank d-1-r."""

    peer: int
    """Global rank of the other one."""
    device: dist.ProcessGroup
    host: dist.ProcessGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateGroups:
    """Groups that a delayed update reduces over, used by one background thread."""

    embedding: dist.ProcessGroup | None
    """First and last stage; None elsewhere, and where nothing is tied."""
    tensor: dist.ProcessGroup | None
    """Tensor-parallel peers; None without any, and where these have no gradients to sum."""
    pipeline: dist.ProcessGroup | None
    """All stages of this pipeline, on the host; None where no tokens are counted."""
    data: dist.ProcessGroup | None
    """Data- and context-parallel peers, on the host; None where no tokens are counted."""
    stage: dist.ProcessGroup | None
    """All ranks of this stage: tensor-, data- and context-parallel peers; None where no experts' tokens are counted."""
    on_device: Mapping[tuple[int, ...], dist.ProcessGroup]
    """By ranks: who sums gradients."""
    on_host: Mapping[tuple[int, ...], dist.ProcessGroup]
    """By ranks: who sums squared norms. On the host, so that scalars never wait for a device queue."""

    def peers(self, group: dist.ProcessGroup) -> dist.ProcessGroup | None:
        """Our group of the ranks of Megatron's ``group``, for gradients; None for one rank."""
        return self.on_device[_ranks(group)] if group.size() > 1 else None

    def statistics(self, group: dist.ProcessGroup) -> dist.ProcessGroup:
        """Our group of the ranks of Megatron's ``group``, for scalars."""
        return self.on_host[_ranks(group)]


def create_transfer_groups(timeout: timedelta, lanes: Iterable[Lane]) -> TransferGroups:
    """Collective over all ranks; afterwards, neighbours are connected both ways."""
    pipeline = parallel_state.get_pipeline_model_parallel_group()
    names = {
        lane: f"2bw {'activations' if lane.activations else 'gradients'} {'down' if lane.to_higher_rank else 'up'}"
        for lane in lanes
    }
    with _bound_to_no_device():
        created = TransferGroups(
            ranks=dist.get_process_group_ranks(pipeline),
            lanes={lane: _clone(pipeline, timeout, name, is_urgent=True) for lane, name in names.items()},
        )
    for lane, group in created.lanes.items():
        _connect_neighbours(created.ranks, group, lane)
    return created


@contextlib.contextmanager
def _bound_to_no_device() -> Iterator[None]:
    """Make groups inside as if no training loop had given ``init_process_group`` a ``device_id``.

    With one, groups of NCCL have one channel for all their ranks, not one for each pair that needs it: a receive from
    one neighbour, posted early, would hold up what is sent to the other. And of a group of the host, NCCL would be told
    by those ranks only that are not in it.
    """
    world = dist.group.WORLD
    bound, world.bound_device_id = world.bound_device_id, None
    try:
        yield
    finally:
        world.bound_device_id = bound


def _connect_neighbours(ranks: list[int], group: dist.ProcessGroup, lane: Lane) -> None:
    """Transfer one element over every boundary: every other one at a time, then those between.

    NCCL connects two ranks in their first transfer, and blocks both until they are in it. Left to the schedule,
    that could be a receive that is posted early on one rank and a send that needs something of that rank first.
    """
    here = dist.get_rank()
    element = torch.zeros(1, device=device_of(group))
    boundaries = list(itertools.pairwise(ranks))
    for lower, higher in boundaries[::2] + boundaries[1::2]:
        source, destination = (lower, higher) if lane.to_higher_rank else (higher, lower)
        if here == source:
            dist.send(element, destination, group=group)
        elif here == destination:
            dist.recv(element, source, group=group)


def device_of(group: dist.ProcessGroup) -> torch.device:
    """Where ``group`` transfers from and to."""
    if torch.cuda.is_available() and backend_of(group, "cuda") == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def create_mirror_groups(timeout: timedelta) -> MirrorGroups:
    """Collective over all ranks."""
    pipeline = parallel_state.get_pipeline_model_parallel_group()
    return MirrorGroups(
        peer=dist.get_process_group_ranks(pipeline)[::-1][pipeline.rank()],
        device=_clone(pipeline, timeout, "2bw mirror"),
        host=_clone(pipeline, timeout, "2bw mirror losses", backend="gloo"),
    )


def create_mirrored_group() -> dist.ProcessGroup:
    """This rank's pipeline in reversed order: rank r of it has place d-1-r. Collective over all ranks."""
    mine = _ranks(parallel_state.get_pipeline_model_parallel_group())
    everyone: list[tuple[int, ...]] = [()] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    made = {ranks: _reversed(ranks) for ranks in sorted(set(everyone))}
    return made[mine]


def _reversed(ranks: tuple[int, ...]) -> dist.ProcessGroup:
    """A group of ascending ``ranks`` in which the last one comes first."""
    if "sort_ranks" in inspect.signature(dist.new_group).parameters:
        return dist.new_group(ranks[::-1], sort_ranks=False)
    return dist.new_group([_Descending(rank) for rank in ranks])


class _Descending(int):
    """A rank that comes before lower ones where torch sorts the ranks of a group, as it always does before 2.12."""

    def __lt__(self, other: int) -> bool:
        return int(self) > int(other) if isinstance(other, _Descending) else int(self) < other


def create_update_groups(
    timeout: timedelta,
    *,
    tied_embeddings: bool,
    sums_over_tensor_ranks: bool,
    counts_tokens: bool,
    counts_experts_tokens: bool,
    gradients: Iterable[dist.ProcessGroup],
    statistics: Iterable[dist.ProcessGroup],
    weights: Iterable[dist.ProcessGroup],
) -> UpdateGroups:
    """Collective over all ranks.

    Args:
        timeout: of every collective.
        tied_embeddings: whether the first and the last stage share a weight.
        sums_over_tensor_ranks: whether tensor-parallel peers have parts of gradients of weights that each has whole.
        counts_tokens: whether the loss is a mean over tokens.
        counts_experts_tokens: whether the tokens of experts are summed for an update, on any stage.
        gradients: Megatron's groups over which this rank's gradient buffers are summed.
        statistics: Megatron's groups over which its optimizers sum norms.
        weights: Megatron's groups over which its optimizers gather what they have updated.
    """
    embedding = parallel_state.get_embedding_group(check_initialized=False) if tied_embeddings else None
    tensor = parallel_state.get_tensor_model_parallel_group() if sums_over_tensor_ranks else None
    pipeline = parallel_state.get_pipeline_model_parallel_group()
    data = parallel_state.get_data_parallel_group(with_context_parallel=True)
    stage = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
    created = UpdateGroups(
        embedding=_clone(embedding, timeout, "2bw embedding") if tied_embeddings else None,
        tensor=_clone(tensor, timeout, "2bw tensor"),
        pipeline=_clone(pipeline, timeout, "2bw tokens", backend="gloo") if counts_tokens else None,
        data=_clone(data, timeout, "2bw tokens of replicas", backend="gloo") if counts_tokens else None,
        stage=_clone(stage, timeout, "2bw tokens of experts") if counts_experts_tokens else None,
        on_device=_clones((group for group in gradients if group.size() > 1), timeout, "2bw gradients"),
        on_host=_clones(statistics, timeout, "2bw scalars", backend="gloo"),
    )
    # In one order on all ranks: each of a rank's groups, by kind and then by its ranks; Megatron's, by kind.
    of_gradients = map(created.on_device.get, sorted(created.on_device))
    of_weights = dict.fromkeys(group for group in weights if group.size() > 1)
    for group in (created.embedding, created.tensor, created.stage, *of_gradients, *of_weights):
        if group is not None:
            _connect_all(group)
    return created


def _connect_all(group: dist.ProcessGroup) -> None:
    """Sum one element over all ranks of ``group``.

    NCCL connects them in their first collective, and blocks each until all are in it: with receives posted early, and
    what else waits for the whole device, ranks could wait for each other there in the first batch.
    """
    element = torch.zeros(1, device=device_of(group))
    dist.all_reduce(element, group=group)
    element.item()  # Waits for it.


def create_host_group(group: dist.ProcessGroup, timeout: timedelta, description: str) -> dist.ProcessGroup:
    """A second group of the same ranks, for what does not concern the device. Collective over all ranks."""
    return _clone(group, timeout, description, backend="gloo")


def _clone(
    group: dist.ProcessGroup | None,
    timeout: timedelta,
    description: str,
    backend: str | None = None,
    *,
    is_urgent: bool = False,
) -> dist.ProcessGroup | None:
    """A second group of the same ranks; None where this rank is in no such group."""
    clones = _clones([] if group is None else [group], timeout, description, backend, is_urgent=is_urgent)
    return next(iter(clones.values()), None)


def _clones(
    groups: Iterable[dist.ProcessGroup],
    timeout: timedelta,
    description: str,
    backend: str | None = None,
    *,
    is_urgent: bool = False,
) -> dict[tuple[int, ...], dist.ProcessGroup]:
    """Second groups of the same ranks, by these; ranks may bring different numbers of groups.

    Args:
        groups: Megatron's.
        timeout: of what they do.
        description: for messages.
        backend: None for that of ``groups``.
        is_urgent: on a GPU, its kernels come before others that are ready.
    """
    rank = dist.get_rank()
    mine = {_ranks(group): group for group in groups if rank in _ranks(group)}
    # Every rank must create every group, in one order, and knows only its own. As bytes: with thousands of ranks that
    # all tell of a group of all of them, numbers of Python's would take gigabytes.
    everyone: list[set[bytes]] = [set() for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, {array("I", ranks).tobytes() for ranks in mine})
    all_of_them = sorted(tuple(array("I", ranks)) for ranks in set().union(*everyone))
    if backend == "gloo":
        _allow_connections(sum(map(len, mine)))
    with _bound_to_no_device() if backend == "gloo" else contextlib.nullcontext():
        clones = {
            # By Megatron's function, so that --distributed-timeout-seconds-after-init finds them, too.
            ranks: parallel_state.create_group(
                list(ranks),
                timeout=timeout,
                backend=backend or dist.get_backend(),
                pg_options=None if backend == "gloo" or ranks not in mine else _nccl_options(mine[ranks], is_urgent),
                group_desc=description,
            )
            for ranks in all_of_them
        }
    return {ranks: clones[ranks] for ranks in mine}


def _allow_connections(count: int) -> None:
    """Let this process open ``count`` files more: gloo connects each rank of a group with every other one.

    Many systems begin with 1,024 files, too few beyond some 500 ranks, and let a process raise that by itself.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY:
        wanted = soft + count if hard == resource.RLIM_INFINITY else min(soft + count, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _nccl_options(group: dist.ProcessGroup, is_urgent: bool) -> dist.ProcessGroupNCCL.Options | None:
    """What a user gave to Megatron for ``group``; None where it is not of NCCL.

    By ``--nccl-communicator-config-path`` or ``--high-priority-stream-groups``. Not the object that the group has:
    torch adds to it where a group comes from.
    """
    if backend_of(group, "cuda") != "nccl":
        return None
    given = group._get_backend(torch.device("cuda")).options
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=is_urgent or given.is_high_priority_stream)
    for name in ("cga_cluster_size", "min_ctas", "max_ctas", "net_name"):
        if (value := getattr(given.config, name)) is not None:
            setattr(options.config, name, value)
    return options


def _ranks(group: dist.ProcessGroup) -> tuple[int, ...]:
    return tuple(sorted(dist.get_process_group_ranks(group)))
