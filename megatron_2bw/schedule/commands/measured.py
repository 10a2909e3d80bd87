"""What ``megatron-2bw show --measured`` says about a run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from megatron_2bw.schedule.action import COMPUTE, ActionType
from megatron_2bw.schedule.commands.arguments import plural, table
from megatron_2bw.schedule.pictures.measured import STEPS, Run, cut
from megatron_2bw.schedule.timeline import Event, Timeline, percent


def report(run: Run) -> Iterator[str]:
    """Lines: what every stage does, the bubble, and where the time goes.

    Raises:
        ScheduleError: the run is too short.
    """
    run.check_long_enough()
    schedule = run.schedule
    size = f"{plural(schedule.stages, 'stage')}, {plural(schedule.microbatches, 'microbatch')}"
    yield f"{schedule.name}: {size}, {plural(run.batches, 'batch')} measured; medians in ms"
    yield ""
    waits = run.waits()
    of_stages = [
        ("stage", range(schedule.stages)),
        ("forward", _ms(run.duration_s(ActionType.FORWARD))),
        ("  of which reading data", _ms(run.data_s())),
        ("backward", _ms(run.duration_s(ActionType.BACKWARD))),
        ("update", _ms(run.duration_s(ActionType.UPDATE))),
    ]
    of_ranks = [
        ("per batch, waiting for activations", _ms(wait.activations_s for wait in waits)),
        ("per batch, waiting for gradients", _ms(wait.gradients_s for wait in waits)),
        ("per batch, waiting for reductions", _ms(wait.reductions_s for wait in waits)),
        ("per batch, outside of all these", _ms(wait.outside_s for wait in waits)),
    ]
    # Where a rank has two stages, the columns are not the same ones.
    has_one = all(schedule.stages_of(rank) == {rank} for rank in range(schedule.stages))
    yield from table(*of_stages, *([] if has_one else [("rank", range(schedule.stages))]), *of_ranks)
    yield ""
    yield f"bubble {percent(run.bubble)}; simulated from forwards and backwards alone"
    yield f"  each as long as it was           {percent(run.replayed_bubble)}"
    yield f"  each as long as its stage's median {percent(run.simulated_bubble)}"
    yield f"a flush leaves at least {percent(run.flush_bubble)}"
    yield ""
    yield "what a batch takes, simulated with one more cause per line up to what was measured:"
    causes = run.causes()
    width = max(map(len, STEPS.values()))
    for step, cause_s in causes.items():
        yield f"  {STEPS[step]:<{width}} {1000 * cause_s:>+10.2f} ms"
    yield f"  {'measured':<{width}} {1000 * run.period_s:>10.2f} ms"


def beside_each_other(run: Run, batches: int) -> list[Timeline]:
    """As many batches of the run and of its simulation, from the middle of both."""
    schedule = run.schedule
    settle = 2 * schedule.stages
    simulated = run.simulated(batches=settle + batches + settle)
    ends_s = [
        event.end_s
        for event in simulated.events[0]
        if event.action.type is ActionType.BACKWARD and event.action.microbatch == schedule.microbatches - 1
    ]
    measured, window = run.window(batches=batches), cut(simulated, ends_s[settle], ends_s[settle + batches])
    later = _first_batch(measured) - _first_batch(window)
    events = tuple(
        tuple(Event(e.action.shifted(later), e.start_s, e.end_s) for e in of_rank) for of_rank in window.events
    )
    return [measured, replace(window, events=events, name=f"{schedule.name}, simulated")]


def _first_batch(timeline: Timeline) -> int:
    return next(event.action.batch for event in timeline.events[0] if event.action.type in COMPUTE)


def _ms(times_s: Iterable[float]) -> list[str]:
    return [f"{1000 * time_s:.1f}" for time_s in times_s]
