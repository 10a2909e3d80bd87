"""How long a batch of a pipeline takes: by a closed form, followed, simulated, or where ranks share processors."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from megatron_2bw.planner.errors import PlanError
from megatron_2bw.planner.pipeline import endless, megatron, periods
from megatron_2bw.planner.pipeline.both_ways import chimera_s, gems_s, least_both_ways_s, ordered_s
from megatron_2bw.planner.pipeline.followed import uneven_one_f_one_b_s
from megatron_2bw.planner.pipeline.periods import Pipeline
from megatron_2bw.planner.pipeline.programs import programs_of
from megatron_2bw.planner.pipeline.receives import with_late_receives
from megatron_2bw.planner.specs.cluster import Cluster
from megatron_2bw.planner.specs.layout import Layout
from megatron_2bw.schedule.clock import SLOTS, passes
from megatron_2bw.schedule.durations import Durations
from megatron_2bw.schedule.program import GradientCopy
from megatron_2bw.schedule.registry import BIDIRECTIONAL, DELAYED, MEGATRON

if TYPE_CHECKING:
    from megatron_2bw.schedule.program import Schedule


def shared_s(layout: Layout, pipeline: Pipeline, cluster: Cluster, work_s: float) -> float:
    """Seconds per batch where ranks may have to share processors.

    A profile times ranks that are all busy. While r of d stages run, each is d/r times as fast, up to a processor
    of its own. With a flush, r goes up from 1 and down again, over m*v + d - 1 steps for v chunks; even stages of
    2bw are all busy, without pipelining one is. Uneven stages leave the processors to the slowest, which is never
    faster than on one of its own. Replicas lose some more; see `_turns_s`.
    """
    alone_s, share = batch_s(layout, pipeline), processor_share(cluster)
    if share == 1:
        return alone_s
    stages, steps = pipeline.stages, layout.microbatches * layout.chunks
    running = _running(layout, stages, steps)
    stretch = sum(max(share * stages, count) for count in running) / sum(running)
    boundaries = stages * layout.chunks - 1
    links_s = 2 * layout.microbatches * boundaries * pipeline.send_s / stages
    turns_s = _turns_s(layout, pipeline, share, max(running))
    return max(share * alone_s, stretch * work_s / stages + turns_s + links_s + pipeline.gradients_s + pipeline.norm_s)


def _turns_s(layout: Layout, pipeline: Pipeline, share: float, most_running: int) -> float:
    """What processors idle in a batch of several replicas, because ranks take turns on them and not equal parts.

    One of P processors that finds nothing more to run waits for the others, in whatever order they took what was
    there: for (1 - 1/P) of the longest action at most where none depends on another (Graham, Bounds on Multiprocessing
    Timing Anomalies, SIAM J. Appl. Math. 17, 1969). Those of pipelines do, which makes it about as much on average. At
    the end of a batch only one stage of each replica has something left: no more processors than that can wait.
    """
    processors = share * layout.pipeline * layout.data
    if layout.schedule in DELAYED or layout.data * most_running <= processors:
        return 0.0
    ending = max(1.0, min(processors, layout.data))
    return (1 - 1 / ending) * share * pipeline.first.backward_s / layout.chunks


def _running(layout: Layout, stages: int, steps: int) -> list[int]:
    """How many of the ranks run, from step to step."""
    if layout.schedule in DELAYED:
        return [stages] * steps
    if layout.schedule == "inter-layer":
        return [1] * (steps * stages)
    if layout.schedule in BIDIRECTIONAL:
        return _running_both_ways(programs_of(layout))
    return [min(step, stages, steps, steps + stages - step) for step in range(1, steps + stages)]


def _running_both_ways(programs: Schedule) -> list[int]:
    """The same, with a backward that takes two forwards."""
    ends = passes(programs)
    running = [0] * max(ends.values())
    for (type_, *_), end in ends.items():
        for slot in range(end - SLOTS[type_], end):
            running[slot] += 1
    return running


def processor_share(cluster: Cluster) -> float:
    """Processors per rank, at most 1; below that, ranks share them."""
    return 1.0 if cluster.profile is None else cluster.profile.processor_share


def batch_s(layout: Layout, pipeline: Pipeline) -> float:
    """Seconds per batch in an endless run, as ``simulated_s`` would find.

    By closed form; where none is exact, microbatches are followed, of 2bw until it is known to 1e-4 where that takes
    long. PipeDream has neither and is simulated. With late receives it may be longer by a transfer. Megatron's own
    schedules, which no simulator knows, take what their functions would.
    """
    if layout.schedule == MEGATRON:
        return _megatron_s(layout, pipeline)
    pipeline = _with_waits(layout, pipeline)
    if layout.schedule == "2bw":
        delay = _delay(layout)
        is_closed = not pipeline.late_receives and periods.two_bw_is_exact(pipeline, delay)
        return (periods.two_bw_s if is_closed else endless.two_bw_s)(pipeline, delay)
    if layout.schedule == "gpipe":
        return periods.gpipe_s(pipeline)
    if layout.schedule == "inter-layer":
        return periods.inter_layer_s(pipeline)
    if layout.schedule in ("gems", "chimera"):
        return (gems_s if layout.schedule == "gems" else chimera_s)(pipeline)
    if layout.schedule == "mixpipe":
        return ordered_s(programs_of(layout), pipeline)
    if layout.schedule == "pipedream":
        return simulated_s(layout, pipeline)
    is_closed = periods.one_f_one_b_is_exact(pipeline)
    return (periods.one_f_one_b_s if is_closed else uneven_one_f_one_b_s)(pipeline)


def _megatron_s(layout: Layout, pipeline: Pipeline) -> float:
    """The same of Megatron's own schedules, whose ranks wait for one another's transfers."""
    if layout.chunks > 1:
        return megatron.interleaved_s(pipeline, overlaps=layout.overlap_transfers, waits=layout.waits_for_sends)
    received = with_late_receives(pipeline)
    is_closed = periods.one_f_one_b_is_exact(received) and pipeline.first.pair_s <= pipeline.last.pair_s
    return periods.one_f_one_b_s(received) if is_closed else megatron.one_f_one_b_s(pipeline)


def least_s(layout: Layout, pipeline: Pipeline) -> float:
    """What ``batch_s`` is at least: the same, or less where that follows or simulates."""
    if layout.chunks > 1:
        waits = layout.waits_for_sends or not layout.overlap_transfers
        return periods.least_interleaved_s(pipeline, waits=waits)
    pipeline = with_late_receives(pipeline) if layout.schedule == MEGATRON else _with_waits(layout, pipeline)
    if layout.schedule == "2bw":
        return max(periods.two_bw_s(pipeline, _delay(layout)), _least_waiting_s(pipeline))
    if layout.schedule in ("1f1b-flush", "megatron"):
        return (periods.least_uneven_s if pipeline.each else periods.one_f_one_b_s)(pipeline)
    if layout.schedule in ("chimera", "mixpipe"):
        return least_both_ways_s(pipeline, in_flight=layout.mixpipe_k + layout.mixpipe_gamma)
    return batch_s(layout, pipeline)


def _least_waiting_s(pipeline: Pipeline) -> float:
    """A stage between others waits for one of two transfers per microbatch at least, where receives are late."""
    p = pipeline
    if not p.late_receives or p.stages < 3:
        return 0.0
    return p.microbatches * (p.middle.pair_s + p.send_s) + p.update_s


def _with_waits(layout: Layout, pipeline: Pipeline) -> Pipeline:
    """With transfers as work, where ranks wait for them; with more in flight not all do."""
    return pipeline if layout.extra_in_flight or not pipeline.late_receives else with_late_receives(pipeline)


def _delay(layout: Layout) -> periods.Delay:
    return periods.Delay(layout.extra_in_flight, layout.delayed_microbatches or None, gradient_copy(layout))


def simulated_s(layout: Layout, pipeline: Pipeline) -> float:
    """Seconds per batch in an endless run of the Programs that the executor runs.

    Raises:
        PlanError: Megatron's own schedule, which the executor does not run.
    """
    # A search does not need the simulator, and a tenth of a second to load it is long.
    from megatron_2bw.schedule.engine import Model
    from megatron_2bw.schedule.lowering import lower, with_gradient_copy
    from megatron_2bw.schedule.simulate import simulate, steady_state

    if layout.schedule == MEGATRON:
        raise PlanError(f"schedule {MEGATRON}: the executor runs schedules of its own; use 1f1b-flush")
    programs = programs_of(layout)
    stages = pipeline.in_order
    durations = Durations(
        forward_s=tuple(stage.forward_s for stage in stages),
        backward_s=tuple(stage.backward_s for stage in stages),
        # Of a rank's two stages, one is updated there.
        update_s=pipeline.update_s / len(programs.stages_of(0)),
        send_s=pipeline.sends_s or pipeline.send_s,
        gradients_s=pipeline.gradients_s,
        norm_s=pipeline.norm_s,
    )
    if programs.name == "2bw":
        programs = with_gradient_copy(programs, gradient_copy(layout))
    if pipeline.late_receives:
        late = replace(lower(programs), late_receives=True)
        return float(steady_state(late, durations, model=Model.POSTED).period_s)
    if not any(programs.delay):  # A flush leaves nothing to the next batch.
        return float(simulate(programs, durations, 1).makespan_s)
    return float(steady_state(programs, durations).period_s)


def gradient_copy(layout: Layout) -> GradientCopy:
    """What 2bw keeps of finished gradients with these flags."""
    if layout.gradient_buffers == 1:
        return GradientCopy.NONE
    is_sharded = max(layout.shards(layout.replicas), layout.shards(layout.expert_replicas)) > 1
    return GradientCopy.SHARD if is_sharded else GradientCopy.WHOLE
