"""MixPipe: Chimera that injects fewer microbatches at first, for less memory, and more of them early, for fewer bubbles."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product

from megatron_2bw.schedule.action import ActionType
from megatron_2bw.schedule.errors import ScheduleError
from megatron_2bw.schedule.program import Schedule
from megatron_2bw.schedule.systems.directions import bidirectional, check_even
from megatron_2bw.schedule.systems.greedy import PREFERENCES, PREFERENCES_OF_MANY, Greedy, Limits, Preference


def mixpipe(stages: int, microbatches: int, *, k: int | None = None, gamma: int | None = None) -> Schedule:
    """Start with k microbatches in both directions together, then alternate; take in gamma more on the way.

    Activations at most ``k + gamma``. With ``k = d`` and ``gamma = 0`` it takes as long as Chimera. More than d
    microbatches keep up to ``3d/2 - 1`` in flight; from about 2d on, their bubble is the paper's, ``d/2 - 1`` forwards and
    backwards, at up to 10 stages, and at more up to d/3 slots longer, however many there are. Two copies of the weights, of
    one version; no delay.

    Args:
        stages: d, even.
        microbatches: d, or more without k and gamma; even.
        k: even, 2 to d (default: d).
        gamma: 0 to ``(d - k)/2`` (default: 0).

    Raises:
        ScheduleError: other numbers.

    Source: Zhang et al., "MixPipe", DAC 2023, sections III-B and III-C. Where several passes could run, the paper
    does not say which; of a few ways to choose we take the first that lasts as long as its formula says, or else
    the shortest.

    >>> from megatron_2bw.schedule.pictures.draw import grid
    >>> print(grid(mixpipe(4, 4, k=2, gamma=1), batches=1))
    rank 0  a0 .  .  a1 A1--- a2 .  .  .  a3 A3--- A0--- .  .  A2---|
    rank 1  .  a0 a1 .  .  .  A1--- a2 a3 A0--- .  A3--- A2--- .  . |
    rank 2  .  a1 a0 .  .  .  A0--- a3 a2 A1--- .  A2--- A3--- .  . |
    rank 3  a1 .  .  a0 A0--- a3 .  .  .  a2 A2--- A1--- .  .  A3---|
    a0 forward, A0 backward of microbatch 0 in batch a (b, c: the next ones); | update; . idle
    """
    check(stages, microbatches, k=k, gamma=gamma)
    if microbatches > stages:
        largest = [_largest_limits(rank, stages, microbatches // 2) for rank in range(stages)]
        ways = product([largest], PREFERENCES_OF_MANY)
        return _best(stages, microbatches, ways, 3 * (microbatches + stages // 2 - 1))
    k, gamma = stages if k is None else k, gamma or 0
    choices = [
        [_limits(rank, stages, k, gamma, fills=fills) for rank in range(stages)]
        for fills in ((True, False) if k < stages else (False,))
    ]
    return _best(stages, microbatches, product(choices, PREFERENCES), claimed_span(stages, k, gamma))


def check(stages: int, microbatches: int, *, k: int | None = None, gamma: int | None = None) -> None:
    """Whether ``mixpipe`` takes these numbers, without looking for an order.

    Raises:
        ScheduleError: it does not.
    """
    check_even("mixpipe", stages)
    if microbatches % 2 or microbatches < stages:
        raise ScheduleError(
            f"mixpipe sends as many microbatches up as down, at least {stages} in all, and got {microbatches}: "
            "use an even number, not below the depth"
        )
    if microbatches > stages:
        if k is not None or gamma is not None:
            raise ScheduleError(
                f"mixpipe got k or gamma with {microbatches} microbatches on {stages} stages: they say how to run one "
                "microbatch per stage; leave them out, or use as many microbatches as stages"
            )
        return
    k, gamma = stages if k is None else k, gamma or 0
    if k % 2 or not 2 <= k <= stages:
        raise ScheduleError(f"mixpipe got k = {k} (--mixpipe-k); use an even number from 2 to the depth, {stages}")
    if not 0 <= gamma <= (stages - k) // 2:
        raise ScheduleError(
            f"mixpipe got gamma = {gamma} (--mixpipe-gamma); with k = {k}, use 0 to (d - k)/2 = {(stages - k) // 2}"
        )


def claimed_span(stages: int, k: int, gamma: int) -> int:
    """Slots of one batch, as the paper has it: ``3*(d + N_bubbles)``, ``N_bubbles = (5d - 3k - 4)/3 - gamma``.

    It cannot be reached everywhere: with at most ``k + gamma`` in flight, a batch takes at least
    ``3*d*(d+1) / (2*(k+gamma))``, which is more for d = 10, k = 2, for one.

    >>> claimed_span(4, 2, 1)
    19
    """
    return 8 * stages - 3 * k - 4 - 3 * gamma


def _limits(rank: int, stages: int, k: int, gamma: int, *, fills: bool) -> Limits:
    """Section III-B: the two ranks in the middle start with k in flight, the others with fewer."""
    is_middle = rank in (stages // 2 - 1, stages // 2)
    each_way = min(k // 2, stages - rank), min(k // 2, rank + 1)
    return Limits(each_way, k + gamma, gamma, fills and not is_middle)


def _largest_limits(rank: int, stages: int, each_way: int) -> Limits:
    """Section III-C: ``d + min(rank, d-1-rank)`` in flight, if there are so many."""
    far, near = min(stages - 1, each_way), 1 + min(rank, stages - 1 - rank)
    return Limits((far, near) if rank < stages // 2 else (near, far), far + near, yields=True)


def _best(
    stages: int, microbatches: int, ways: Iterable[tuple[list[Limits], tuple[Preference, Preference]]], claimed: int
) -> Schedule:
    """Choose in each of the ways; take the first that lasts as long as the paper says, or else the shortest."""
    found: list[Greedy] = []
    for limits, (forwards, backwards) in ways:
        greedy = Greedy(stages, microbatches, limits, {ActionType.FORWARD: forwards, ActionType.BACKWARD: backwards})
        if not greedy.run():
            continue
        if greedy.now == claimed:
            found = [greedy]
            break
        found.append(greedy)
    best = min(found, key=lambda greedy: greedy.now)
    in_flight = tuple(rank.most_open for rank in best.ranks)
    return bidirectional("mixpipe", stages, microbatches, [rank.passes for rank in best.ranks], in_flight)
