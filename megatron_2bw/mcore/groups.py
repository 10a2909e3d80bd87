"""Process groups of our own, so that our traffic never meets Megatron's."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from megatron.core import parallel_state


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferGroups:
    """Groups of one pipeline's ranks, one per direction."""

    ranks: list[int]
    """Global rank of each stage."""
    forward: dist.ProcessGroup
    backward: dist.ProcessGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateGroups:
    """Groups that a delayed update reduces over, used by one background thread."""

    scalars: dist.ProcessGroup
    """All ranks that share one model copy, on the host: norms never wait for a device queue."""
    gradients: dist.ProcessGroup | None
    """Data-parallel peers of this stage; None where there is one replica."""
    embedding: dist.ProcessGroup | None
    """First and last stage; None elsewhere."""


def create_transfer_groups(timeout: timedelta) -> TransferGroups:
    """Collective over all ranks."""
    pipeline = parallel_state.get_pipeline_model_parallel_group()
    return TransferGroups(
        ranks=dist.get_process_group_ranks(pipeline),
        forward=_clone(pipeline, timeout, "2bw forward"),
        backward=_clone(pipeline, timeout, "2bw backward"),
    )


def create_update_groups(timeout: timedelta, *, tied_embeddings: bool) -> UpdateGroups:
    """Collective over all ranks."""
    replicas = parallel_state.get_data_parallel_group(with_context_parallel=True)
    embedding = parallel_state.get_embedding_group(check_initialized=False) if tied_embeddings else None
    return UpdateGroups(
        scalars=_clone(parallel_state.get_model_parallel_group(), timeout, "2bw scalars", backend="gloo"),
        gradients=_clone(replicas, timeout, "2bw gradients") if replicas.size() > 1 else None,
        embedding=_clone(embedding, timeout, "2bw embedding") if tied_embeddings else None,
    )


def create_lonely_group() -> dist.ProcessGroup:
    """A group of this rank alone: a barrier on it waits for nobody."""
    return dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True)


def _clone(
    group: dist.ProcessGroup | None, timeout: timedelta, description: str, backend: str | None = None
) -> dist.ProcessGroup | None:
    """A second group of the same ranks; None where this rank is in no such group."""
    rank = dist.get_rank()
    ranks = dist.get_process_group_ranks(group) if group is not None else []
    # Every rank must create every group, in one order, and knows only its own.
    everyone: list[list[int]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, sorted(ranks) if rank in ranks else [])
    clones = [
        dist.new_group(list(members), timeout=timeout, backend=backend or dist.get_backend(), group_desc=description)
        for members in sorted({tuple(members) for members in everyone if members})
    ]
    return next((clone for clone in clones if rank in dist.get_process_group_ranks(clone)), None)
