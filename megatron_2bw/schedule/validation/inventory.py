"""Every rank does each thing that its stages need exactly once per batch."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_2bw.schedule.action import COMPUTE, TRANSFERS, WORK, Action, ActionType, Reduction
from megatron_2bw.schedule.calls import groups
from megatron_2bw.schedule.program import Schedule
from megatron_2bw.schedule.validation.rules import Rule, RuleBroken

_COMMUNICATION = frozenset(ActionType) - WORK


def check_declaration(schedule: Schedule) -> None:
    """Refuse bounds that do not fit the Programs.

    Raises:
        RuleBroken: which bound.
    """
    ranks = len(schedule.programs)
    if schedule.per_boundary < 1:
        raise RuleBroken(Rule.DECLARATION, f"per_boundary = {schedule.per_boundary}; at least 1 crosses each boundary")
    for name, values, count, least in (
        ("delay", schedule.delay, schedule.stages, 0),
        ("weight_versions", schedule.weight_versions, ranks, 1),
        ("in_flight", schedule.in_flight, ranks, 1),
    ):
        if len(values) != count or min(values, default=0) < least:
            per = "stage" if name == "delay" else "rank"
            raise RuleBroken(
                Rule.DECLARATION, f"{name} = {values}; it takes {count} numbers, one per {per}, from {least} up"
            )


def check_compute(schedule: Schedule) -> None:
    """Refuse missing, repeated or strange F, B and UPDATE, versions that are not the declared ones, inputs that
    come from a later call or from long before, and ranks that share some of their stages.

    Raises:
        RuleBroken: the first one found.
    """
    _check_homes_and_versions(schedule)
    _check_counts(schedule, only=WORK)
    _check_inputs(schedule)
    _check_shared_stages(schedule)


def _check_homes_and_versions(schedule: Schedule) -> None:
    homes: dict[tuple[ActionType, int, int | None], int] = {}
    for rank, action in _each(schedule):
        if not 0 <= action.stage < schedule.stages:
            raise RuleBroken(Rule.FOREIGN, f"stages are 0 to {schedule.stages - 1}", rank, action=action)
        if action.microbatch is not None and not 0 <= action.microbatch < schedule.microbatches:
            raise RuleBroken(Rule.FOREIGN, f"microbatches are 0 to {schedule.microbatches - 1}", rank, action=action)
        if action.type not in COMPUTE:
            continue
        if action.batch < 0:
            raise RuleBroken(Rule.BATCH, f"the first call would run batch {action.batch}", rank, action=action)
        if homes.setdefault((action.type, action.stage, action.microbatch), rank) != rank:
            raise RuleBroken(Rule.DUPLICATE, f"another rank does {_bare(action)} too", rank, action=action)
        expected = schedule.version_of(action)
        if action.version != expected:
            given = "none" if action.version is None else f"v{action.version}"
            raise RuleBroken(
                Rule.VERSION, f"version is {given}, the declared delay asks for v{expected}", rank, action=action
            )
    for stage in range(schedule.stages):
        for microbatch in range(schedule.microbatches):
            forward, backward = (homes.get((type_, stage, microbatch)) for type_ in ("F", "B"))
            if forward is None:
                host = next((rank for rank, action in _each(schedule) if action.stage == stage), backward)
                raise RuleBroken(Rule.MISSING, f"no rank has {stage}F{microbatch}", host)
            if backward != forward:
                raise RuleBroken(Rule.MISSING, f"{stage}B{microbatch} has to be where {stage}F{microbatch} is", forward)


def _check_inputs(schedule: Schedule) -> None:
    computes = {
        (action.type, action.stage, action.microbatch): (rank, action)
        for rank, action in _each(schedule)
        if action.type in COMPUTE
    }
    for (type_, stage, microbatch), (rank, user) in computes.items():
        made_by = type_, stage + (-1 if type_ is ActionType.FORWARD else 1), microbatch
        other, maker = computes.get(made_by, (rank, user))
        calls = maker.batch - user.batch
        if calls < 0:
            raise RuleBroken(Rule.NO_INPUT, f"{maker} makes it in a later call", rank, action=user)
        if calls > 1 and other != rank:
            raise RuleBroken(Rule.BOUNDARY, f"{maker} makes its input {calls} calls before", rank, action=user)


def _check_shared_stages(schedule: Schedule) -> None:
    hosted = [schedule.stages_of(rank) for rank in range(len(schedule.programs))]
    for rank, stages in enumerate(hosted):
        other = next((other for other in hosted if not other.isdisjoint(stages) and other != stages), None)
        if other is not None:
            raise RuleBroken(
                Rule.DECLARATION,
                f"it has stages {sorted(stages)} and another rank {sorted(other)}: ranks that share a stage sum the "
                "gradients of all their stages at once, and need the same ones",
                rank,
            )


def check_communication(schedule: Schedule) -> tuple[tuple[Reduction, ...], ...]:
    """Refuse missing, repeated or strange transfers and reductions; returns each rank's chain.

    Raises:
        RuleBroken: the first one found.
    """
    return _check_counts(schedule, only=_COMMUNICATION)


def _check_counts(schedule: Schedule, only: frozenset[ActionType]) -> tuple[tuple[Reduction, ...], ...]:
    used = {action.reduction for _, action in _each(schedule)}
    members = groups(schedule)
    chains = []
    for rank, program in enumerate(schedule.programs):
        chain = tuple(kind for kind in Reduction if kind in used and rank in members[kind, rank])
        missing = set(_needed(schedule, rank, chain, only))
        seen = set()
        for action in program.steady:
            if action.type not in only:
                continue
            bare = _bare(action)
            if bare in seen:
                raise RuleBroken(Rule.DUPLICATE, f"rank {rank} has {bare} twice", rank, action=action)
            if bare not in missing:
                raise RuleBroken(Rule.FOREIGN, f"rank {rank} has no use for {bare}", rank, action=action)
            missing.remove(bare)
            seen.add(bare)
        if missing:
            raise RuleBroken(Rule.MISSING, f"rank {rank} lacks {', '.join(sorted(map(str, missing)))}", rank)
        chains.append(chain)
    return tuple(chains)


def _needed(
    schedule: Schedule, rank: int, chain: tuple[Reduction, ...], only: frozenset[ActionType]
) -> Iterator[Action]:
    """What ``rank`` has to do per batch, of the types in ``only``, given where forwards are."""
    forwards = [action for action in schedule.programs[rank].steady if action.type is ActionType.FORWARD]
    homes = {(action.stage, action.microbatch) for action in forwards}
    for type_ in only & COMPUTE:
        yield from (Action(type_, stage, microbatch) for stage, microbatch in homes)
    for type_ in only & TRANSFERS:
        transfers = (Action(type_, stage, microbatch) for stage, microbatch in homes)
        yield from (transfer for transfer in transfers if schedule.peer_of(transfer) not in (None, rank))
    once = _needed_once({stage for stage, _ in homes}, schedule.stages, chain)
    yield from (action for action in once if action.type in only)


def _needed_once(homes: set[int], stages: int, chain: tuple[Reduction, ...]) -> Iterator[Action]:
    """What a rank with the stages ``homes`` has to do once per batch, not once per microbatch."""
    for stage in homes:
        yield Action(ActionType.UPDATE, stage)
        for kind in chain:
            if kind is not Reduction.EMBEDDING or stage in (0, stages - 1):
                yield Action(ActionType.REDUCE_WAIT, stage, reduction=kind)
    # A rank starts a reduction once for all its stages; `_bare` leaves out which of them names it.
    yield from (Action(ActionType.REDUCE_START, 0, reduction=kind) for kind in chain)


def _bare(action: Action) -> Action:
    """What is unique within a call."""
    if action.type in TRANSFERS and action.batch == 0 and action.version is None:
        return action
    stage = 0 if action.type is ActionType.REDUCE_START else action.stage
    return Action(action.type, stage, action.microbatch, reduction=action.reduction)


def _each(schedule: Schedule) -> Iterator[tuple[int, Action]]:
    return ((rank, action) for rank, program in enumerate(schedule.programs) for action in program.steady)
