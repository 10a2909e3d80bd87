"""What a run must compute: the results of delayed training on one undivided model."""

from __future__ import annotations

import functools
from dataclasses import replace
from functools import partial

import torch

from .case import Case
from .delayed import Rules, main
from .faults import INFINITE_GRADIENT
from .harness import Results, collect, merge


def oracle(
    case: Case,
    *,
    delay: int = 0,
    evaluate_every: int = 0,
    delayed_batches: int | None = None,
    ordinary_batches: int = 0,
    clipped_as: Results | None = None,
) -> Results:
    """What ``case`` must compute; its layout and flags do not matter, ``case.model`` does.

    Args:
        delay: 0 for ordinary training, 1 for 2BW; PipeDream's is known from the schedule.
        evaluate_every: batches between evaluations, with one at the end; 0 for none.
        delayed_batches: from this batch on, training is ordinary.
        ordinary_batches: before this batch, training is ordinary; from it on, as if a delayed run began.
        clipped_as: clip by the norms of this run, and record its own all the same. The global norm is the one number
            whose order of additions no oracle can follow; with it given, the rest can be compared bit for bit.
    """
    plain = replace(
        case,
        schedule=None,
        stages=1,
        layers=case.num_layers,
        # Where several further tokens are predicted it changes the order in which gradients of one tensor are added.
        recompute=case.recompute if "--mtp-num-layers" in case.model else "no",
        expert_parallel=1,
        expert_tensor_parallel=case.expert_tensor_parallel if case.expert_tensor_parallel < case.tensor_parallel else 0,
        distributed_optimizer=False,
        # It tells where a weight is used twice: autograd would add up the uses before the microbatches. And on a GPU,
        # where products are added in fp32, not rounded before.
        fused_gradients=case.fused_gradients and (case.device == "cuda" or "--mtp-num-layers" in case.model),
        flags=(),
        faults=(),
        record_actions=False,
    )
    rules = Rules(
        delay=delay,
        directions=2 if case.schedule in ("gems", "chimera", "mixpipe") else 1,
        pipedream_stages=case.stages if case.schedule == "pipedream" else 0,
        evaluate_every=evaluate_every,
        delayed_batches=delayed_batches,
        ordinary_batches=max(ordinary_batches, sum(batch not in case.skipped for batch in range(case.synchronous))),
        norms=tuple(zip(clipped_as.norms.tolist(), clipped_as.norms_apart.tolist(), strict=True))
        if clipped_as is not None and case.clip
        else None,
        infinite=frozenset(fault.call // case.microbatches for fault in case.faults if fault.kind == INFINITE_GRADIENT),
        two_tied_copies=(case.tied or "--mtp-num-layers" in case.model) and case.stages > 1,
    )
    return cached(plain, rules)


@functools.cache
def cached(case: Case, rules: Rules) -> Results:
    """Each distinct oracle runs once per session."""
    records = collect(partial(main, rules=rules), case, ranks=case.tensor_parallel * case.context_parallel)
    for record in records:
        record.losses = _by_replica(record.losses, case)
        record.seeds = _by_replica(record.seeds, case)
    results = merge(records, case)
    shape = (case.context_parallel, case.replicas, -1, case.microbatches_per_row)
    losses, seeds = (found.view(shape).transpose(0, 1).flatten(0, 1) for found in (results.losses, results.seeds))
    return replace(results, losses=losses, seeds=seeds)


def _by_replica(scalars: list[torch.Tensor], case: Case) -> list[torch.Tensor]:
    """Scalars in the order (batch, replica, microbatch), ordered by replica first."""
    of_batches = torch.stack(scalars).split([case.replicas * len(span) for span in case.spans()])
    return list(torch.cat([of_batch.view(case.replicas, -1) for of_batch in of_batches], dim=1).flatten())
