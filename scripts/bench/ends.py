"""Whether stages with other layers on the ends, which the search chooses, run faster than equal ones.

    python scripts/bench/ends.py [--vocabularies 16384,32768] [--output scripts/bench/results/ends.txt]

For each vocabulary: a profile of 2 ranks, a search as people run it and one with equal stages, and the best layout of
2bw and of a flush from each, run in turn with the flags as printed. The larger the vocabulary, the more the last stage
has to do beside its layers.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from planner_here import MODEL, SAMPLES_PER_RANK, profiled, report
from report import heading, put

from megatron_2bw.planner.measure.profile import Profile
from megatron_2bw.planner.measure.verify import measured
from megatron_2bw.planner.search.finder import Choice
from megatron_2bw.planner.search.search import Plan, search
from megatron_2bw.planner.specs.model import Model
from megatron_2bw.planner.specs.space import Space

RANKS = 2
SCHEDULES = ("2bw", "1f1b-flush")
ROUNDS = 5
"""In which every layout runs once."""


def planned(model: Model, profile: Profile) -> tuple[Plan, Plan]:
    """Pipelines of all ranks with the ends that the search chooses, and with equal stages."""
    chosen = Space(schedules=SCHEDULES, pipelines=(RANKS,))
    equal = replace(chosen, first_stage_layers=(0,), last_stage_layers=(0,))
    return tuple(
        search(model, profile.cluster(), SAMPLES_PER_RANK * RANKS, profile.limited(space)) for space in (chosen, equal)
    )


def pairs(plans: tuple[Plan, Plan]) -> list[tuple[Choice, Choice]]:
    """Of each schedule, the best layout of both plans."""
    return [
        tuple(next(one for one in plan.choices if one.layout.schedule == schedule) for plan in plans)
        for schedule in SCHEDULES
    ]


def compared(model: Model, profile: Profile) -> list[str]:
    """What was predicted and measured."""
    plans = planned(model, profile)
    both = pairs(plans)
    choices = list({choice.layout: choice for pair in both for choice in pair}.values())
    plan = measured(plans[0], choices, rounds=ROUNDS)
    took_s = {choice.layout: choice.measured_s for choice in plan.choices}
    lines = report(plan)
    for (chosen, equal), schedule in zip(both, SCHEDULES, strict=True):
        if chosen.layout == equal.layout:
            lines.append(f"{schedule}: equal stages are chosen")
            continue
        predicted = equal.iteration.time_s / chosen.iteration.time_s
        ran = took_s[equal.layout] / took_s[chosen.layout]
        lines.append(f"{schedule}: equal stages take {ran:.2f} times as long as chosen ones, predicted {predicted:.2f}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabularies", default="16384,32768")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    lines = heading("numpy")
    for size in map(int, options.vocabularies.split(",")):
        model = replace(MODEL, vocab_size=size)
        with tempfile.TemporaryDirectory() as folder:
            profile = profiled(model, RANKS, Path(folder))
        lines += ["", f"{model.name}, vocabulary of {size:,}, fp32, one thread per rank", *compared(model, profile)]
    put(lines, options.output)


if __name__ == "__main__":
    main()
