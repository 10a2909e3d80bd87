"""Profiles this machine, plans with the profile, and runs what the plan says: is the ranking right?

    python scripts/bench/planner_here.py [--ranks 2,4] [--output scripts/bench/results/planner_here.txt]

For each number of ranks: ``megatron-2bw profile`` of a small GPT, the search, then the best layout of all, that of
every schedule on a pipeline of all ranks, and those of one stage and of pipelines of half the ranks that fill up every
batch, run with the flags as printed, in turn.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from report import heading, put_each

from megatron_2bw.planner.cost.costs import SCHEDULES
from megatron_2bw.planner.measure.profile import Profile, Setting
from megatron_2bw.planner.measure.profiling import Request, measure
from megatron_2bw.planner.measure.verify import measured
from megatron_2bw.planner.naming import name
from megatron_2bw.planner.report.advice import advice
from megatron_2bw.planner.report.report import flags_of
from megatron_2bw.planner.search.search import Plan, search
from megatron_2bw.planner.specs.layout import Precision, Recompute
from megatron_2bw.planner.specs.model import Model
from megatron_2bw.planner.specs.space import Space
from megatron_2bw.planner.table import seconds, table

MODEL = Model(
    num_layers=8,
    hidden_size=256,
    num_attention_heads=4,
    seq_length=128,
    vocab_size=1024,
    dropout=False,
    name="GPT, 8 layers, hidden 256, sequence 128",
)
SAMPLES_PER_RANK = 4
MICROBATCHES = (1, 2, 4)
ROUNDS = 3
"""In which every layout runs once."""


def profiled(model: Model, ranks: int, folder: Path) -> Profile:
    """What a layer takes when so many ranks are busy."""
    path = folder / f"profile_{ranks}.json"
    request = Request(
        model=model,
        setting=Setting(ranks=ranks, precision=Precision.FP32, fused_attention=False, sequence_parallel=False),
        tensors=(1,),
        microbatches=MICROBATCHES,
        recomputes=(Recompute.NONE, Recompute.FULL),
    )
    return measure(request, path)


def ran(profile: Profile) -> Plan:
    """The best layout of all, of every schedule on a pipeline of all ranks, and of replicas with a flush, measured."""
    ranks = profile.setting.ranks

    def planned(*pipelines: int) -> Plan:
        space = Space(pipelines=pipelines or None)
        return search(MODEL, profile.cluster(), SAMPLES_PER_RANK * ranks, profile.limited(space))

    plan = planned()
    chosen = [plan.best]
    chosen += [next(one for one in planned(ranks).choices if one.layout.schedule == name) for name in SCHEDULES]
    for stages in sorted({1, ranks // 2}):
        chosen.append(next(one for one in planned(stages).choices if one.layout.schedule != "2bw"))
    distinct = {choice.layout: choice for choice in chosen}
    return measured(plan, list(distinct.values()), rounds=ROUNDS)


def report(plan: Plan) -> list[str]:
    """A table, what it means, and the flags that ran."""
    choices = [choice for choice in plan.choices if choice.measured_s]
    rows = [
        [
            name(choice.layout),
            seconds(choice.iteration.time_s),
            seconds(choice.measured_s),
            " to ".join(map(seconds, choice.measured_range_s)),
            f"{choice.iteration.time_s / choice.measured_s - 1:+.1%}",
        ]
        for choice in choices
    ]
    ranks = plan.cluster.gpus
    return [
        "",
        f"{ranks} ranks, batches of {plan.global_batch} samples; by measured time:",
        *table(["layout", "predicted", "measured", "range", "off"], rows),
        next(iter(advice(plan))),
        *(f"  {name(choice.layout)}: {' '.join(flags_of(plan.model, choice.layout))}" for choice in choices),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    put_each(lines(map(int, options.ranks.split(","))), options.output)


def lines(counts: Iterable[int]) -> Iterator[str]:
    """The report, on each of these numbers of ranks."""
    yield from (*heading("numpy"), "", f"{MODEL.name}, fp32, one thread per rank")
    with tempfile.TemporaryDirectory() as folder:
        for ranks in counts:
            yield from report(ran(profiled(MODEL, ranks, Path(folder))))


if __name__ == "__main__":
    main()
