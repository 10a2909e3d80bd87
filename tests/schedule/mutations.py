"""Ways to spoil a Program."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

from megatron_2bw.schedule.action import COMPUTE, Action, ActionType, Reduction
from megatron_2bw.schedule.lowering import lower, with_gradient_copy
from megatron_2bw.schedule.program import GradientCopy, Program, Schedule
from megatron_2bw.schedule.registry import build

from .others import PIPELINED

CHAINS = (
    (Reduction.GRADIENTS,),
    (Reduction.GRADIENTS, Reduction.NORM),
    tuple(Reduction),
)
ONCE_PER_BATCH = frozenset({ActionType.UPDATE, ActionType.REDUCE_START, ActionType.REDUCE_WAIT})


def with_actions(schedule: Schedule, rank: int, actions: Sequence[Action]) -> Schedule:
    """``schedule`` with another Program on one rank."""
    programs = list(schedule.programs)
    programs[rank] = Program(steady=tuple(actions))
    return replace(schedule, programs=tuple(programs))


def random_schedule(rng: random.Random, *, most_stages: int = 4, most_microbatches: int = 4) -> Schedule:
    """A valid lowered schedule of two or more stages, one per rank."""
    name, stages = rng.choice((*PIPELINED, "pipedream")), rng.randint(2, most_stages)
    extra = rng.choice((0, 0, 1)) if name == "2bw" else 0
    least = (1 + extra) * (stages - 1) if name == "2bw" else 1
    microbatches = 1 if name == "pipedream" else rng.randint(least, max(least, most_microbatches))
    delayed = rng.choice((None, rng.randint(max(least, 1), microbatches))) if name == "2bw" else None
    options = {"extra_in_flight": extra, "delayed_microbatches": delayed}
    schedule = build(name, stages=stages, microbatches=microbatches, **options)
    return lower(with_gradient_copy(schedule, rng.choice(list(GradientCopy))), rng.choice(CHAINS))


def random_mirrored_schedule(rng: random.Random, **_: int) -> Schedule:
    """The same with two stages per rank."""
    stages = rng.choice((2, 4))
    name, microbatches = rng.choice(("gems", "chimera", "mixpipe")), stages * rng.choice((1, 2))
    return lower(build(name, stages=stages, microbatches=microbatches), rng.choice(CHAINS))


def drop(rng: random.Random, actions: list[Action]) -> None:
    del actions[rng.randrange(len(actions))]


def duplicate(rng: random.Random, actions: list[Action]) -> None:
    actions.insert(rng.randrange(len(actions) + 1), rng.choice(actions))


def change_version(rng: random.Random, actions: list[Action]) -> None:
    index = rng.choice([i for i, action in enumerate(actions) if action.type in COMPUTE])
    version = actions[index].version
    actions[index] = actions[index]._replace(version=rng.choice([None, version - 1, version + 1]))


def change_batch(rng: random.Random, actions: list[Action]) -> None:
    index = rng.randrange(len(actions))
    action, by = actions[index], rng.choice([-1, 1])
    actions[index] = action._replace(batch=action.batch + by) if rng.random() < 0.5 else action.shifted(by)


def change_microbatch(rng: random.Random, actions: list[Action]) -> None:
    index = rng.choice([i for i, action in enumerate(actions) if action.microbatch is not None])
    actions[index] = actions[index]._replace(microbatch=actions[index].microbatch + rng.choice([-1, 1]))


def change_stage(rng: random.Random, actions: list[Action]) -> None:
    index = rng.choice([i for i, action in enumerate(actions) if action.type is not ActionType.REDUCE_START])
    actions[index] = actions[index]._replace(stage=actions[index].stage + rng.choice([-1, 1]))


ALWAYS_WRONG: dict[str, Callable[[random.Random, list[Action]], None]] = {
    "drop": drop,
    "duplicate": duplicate,
    "version": change_version,
    "microbatch": change_microbatch,
    "stage": change_stage,
}
"""Each leaves a Program in which something is missing, repeated or of another version."""


def swap(rng: random.Random, actions: list[Action]) -> None:
    i, j = rng.sample(range(len(actions)), 2)
    actions[i], actions[j] = actions[j], actions[i]


def swap_neighbours(rng: random.Random, actions: list[Action]) -> None:
    i = rng.randrange(len(actions) - 1)
    actions[i], actions[i + 1] = actions[i + 1], actions[i]


def move(rng: random.Random, actions: list[Action]) -> None:
    action = actions.pop(rng.randrange(len(actions)))
    actions.insert(rng.randrange(len(actions) + 1), action)


def move_update_or_reduction(rng: random.Random, actions: list[Action]) -> None:
    action = actions.pop(rng.choice([i for i, action in enumerate(actions) if action.type in ONCE_PER_BATCH]))
    actions.insert(rng.randrange(len(actions) + 1), action)


SOMETIMES_WRONG: dict[str, Callable[[random.Random, list[Action]], None]] = {
    "swap": swap,
    "swap neighbours": swap_neighbours,
    "move": move,
    "move update or reduction": move_update_or_reduction,
    "batch": change_batch,
}
"""Each keeps all actions; some results are as good as the original, such as a receive posted one batch ahead."""
