"""Proof that the Programs of all ranks work together and keep the bounds they declare."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_2bw.schedule.action import Action, Reduction
from megatron_2bw.schedule.calls import WHOLE, Part, Phase, Span, lowered, walk_of
from megatron_2bw.schedule.durations import Durations
from megatron_2bw.schedule.engine import Blocked, Model, run
from megatron_2bw.schedule.errors import ScheduleError
from megatron_2bw.schedule.program import Schedule
from megatron_2bw.schedule.validation.channels import Channels
from megatron_2bw.schedule.validation.inventory import check_communication, check_compute, check_declaration
from megatron_2bw.schedule.validation.listing import listing
from megatron_2bw.schedule.validation.rules import RankRules, Rule, RuleBroken

_FREE = Durations(forward_s=0, backward_s=0)


def validate(schedule: Schedule) -> None:
    """Prove that a schedule is correct, or say what is wrong with it.

    Walks through one run that is long enough to repeat itself, then through runs of 1, 2 and so on calls, up to one more
    than forwards run ahead; then through each of them once more, with its first calls as a job begins with them. ``Rule``
    lists what is checked; deadlocks are looked for under every ``Model`` but the one for times. Where the schedule has
    only F, B and UPDATE, default reductions and transfers are added first; otherwise it is taken as it is, with any
    subset of the reductions.

    Raises:
        ScheduleError: the rule, the rank, the call, the action and the values; ``grid`` marks the action.

    >>> from megatron_2bw.schedule.registry import build
    >>> validate(build("2bw", stages=4, microbatches=3))
    >>> try:
    ...     validate(build("2bw", stages=4, microbatches=2))
    ... except ScheduleError as error:
    ...     print(error.message)  # doctest: +ELLIPSIS
    2bw (d=4, m=2): reduction waited for too early: rank 0, steady of call 0, 0REDUCE_WAIT:grads: ...
    """
    try:
        check_declaration(schedule)
        check_compute(schedule)
        schedule = lowered(schedule)
        chains = check_communication(schedule)
        # What is known of the end changes a call that is as far from it as forwards run ahead.
        runs = (_calls_to_repeat(schedule), *range(1, max(schedule.ahead + 1, 2) + 1))
        _check_ranks(schedule, chains, walk_of(schedule, runs))
        # What gets through a queue, which waits for more, gets through on the host.
        _check_progress(schedule, runs, (Model.IN_ORDER_QUEUE, Model.HOST))
        for calls in runs:
            _check_ranks(schedule, chains, walk_of(schedule, [calls], from_start=True))
            _check_progress(schedule, [calls], (Model.FIRST_USE,))
    except RuleBroken as error:
        raise _error_at(schedule, error) from None


def _calls_to_repeat(schedule: Schedule) -> int:
    """Calls after which nothing new happens: what a call does reaches this many calls back and ahead."""
    batches = [action.batch for program in schedule.programs for action in program.steady]
    return 2 + max(batches) - min(batches) + max(schedule.delay)


def _check_ranks(schedule: Schedule, chains: tuple[tuple[Reduction, ...], ...], walk: tuple[Span, ...]) -> None:
    """Follow each rank alone, then compare what they send with what they receive."""
    of_ranks = {part: part.of(schedule) for part in {span.part for span in walk}}
    parts = [{part: of_ranks[part][rank] for part in of_ranks} for rank in range(len(schedule.programs))]
    for rank, of_part in enumerate(parts):
        rules = RankRules(schedule, rank, chains[rank])
        for span in walk:
            action = None
            try:
                if span.phase is Phase.FILL:
                    rules.begin(span.first)
                for action in of_part[span.part]:
                    rules.step(action, span.call)
                action = None
                if span.phase is Phase.DRAIN:
                    rules.end(span.call + 1)
            except RuleBroken as error:
                error.rank, error.span, error.action = rank, span, action
                raise
    Channels(schedule, parts, walk).check()


def _check_progress(schedule: Schedule, runs: Sequence[int], models: tuple[Model, ...]) -> None:
    """Look for deadlocks under the first model, and say the last one under which there is one."""
    blocked: tuple[Blocked, ...] = ()
    for tried in models:
        found = run(schedule, runs, _FREE, model=tried, record=False).blocked
        if not found:
            break
        blocked, model = found, tried
    if not blocked:
        return
    places = (f"rank {rank} in {_call(span)} at {action}" for rank, span, action in blocked)
    error = RuleBroken(Rule.DEADLOCK, f"all wait for each other: {', '.join(places)}")
    part = blocked[0].span.part
    marks = [(rank, action) for rank, span, action in blocked if span.part == part]
    raise _error(schedule, error, f"with {model}", part, marks)


def _error_at(schedule: Schedule, error: RuleBroken) -> ScheduleError:
    """Where ``error`` says that it is."""
    rank, span, action = error.rank, error.span, error.action
    known = ("" if rank is None else f"rank {rank}", span and _call(span), action and str(action))
    part = span.part if span else WHOLE[Phase.STEADY]
    return _error(schedule, error, ", ".join(filter(None, known)), part, [(rank, action)])


def _error(
    schedule: Schedule, error: RuleBroken, where: str, part: Part, marks: list[tuple[int, Action | None]]
) -> ScheduleError:
    name = f"{schedule.name} (d={schedule.stages}, m={schedule.microbatches})"
    message = ": ".join(part for part in (name, error.rule, where, error.detail) if part)
    return ScheduleError(message, listing(schedule, part, marks))


def _call(span: Span) -> str:
    return f"{span.phase} of call {span.call}"
