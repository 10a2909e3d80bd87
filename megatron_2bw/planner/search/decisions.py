"""What a search rules out, and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from megatron_2bw.planner.errors import Problem
from megatron_2bw.planner.specs.space import Space

STEPS = (
    *("pipelines", "tensors", "contexts", "widths", "expert_tensors", "experts", "shape"),
    *("schedules", "chunks", "schedule", "model", "microbatches", "mixpipe_k", "mixpipe_gamma", "extra_in_flight"),
    *("sequence_parallel", "distributed_optimizer", "batch", "gradient_buffers"),
    *("recomputes", "recompute_methods", "recompute_layers", "memory"),
)
"""What decides on a layout, one after the other: dimensions of the space, and the rules on what is chosen so far."""


@dataclass(slots=True, kw_only=True)
class Rejection:
    """A rule that some layouts break."""

    step: str
    """One of ``STEPS``."""
    rule: str
    """A few words."""
    problem: Problem | str
    """The rule in full, for the first layout that breaks it."""
    example: str
    count: int = 1
    """How often; once for all layouts that differ only in what the rule does not ask for."""

    @property
    def reason(self) -> str:
        """With its remedy."""
        return str(self.problem)


@dataclass(slots=True, kw_only=True)
class Decisions:
    """Rules that layouts break, and limits that leave none."""

    space: Space
    rejected: dict[str, Rejection] = field(default_factory=dict)
    """By rule."""
    layouts: int = 0
    """Rejected or found so far."""
    furthest: str = STEPS[0]
    """The last of ``STEPS`` at which a layout was ruled out."""

    def stop(self, step: str) -> None:
        """Remember that ``step``, one of ``STEPS``, leaves nothing."""
        self.furthest = max(self.furthest, step, key=STEPS.index)

    def reject(self, step: str, rule: str, problem: Problem | str, example: str) -> None:
        """Count a broken rule."""
        self.stop(step)
        if rule in self.rejected:
            self.count(rule)
        else:
            self.layouts += 1
            self.rejected[rule] = Rejection(step=step, rule=rule, problem=problem, example=example)

    def count(self, rule: str) -> None:
        """Count another layout that breaks ``rule``, of which there is an example."""
        self.layouts += 1
        self.rejected[rule].count += 1

    def allowed[Value](self, dimension: str, values: Sequence[Value]) -> Sequence[Value]:
        """Those of ``values`` within the limits."""
        allowed = self.space.allows(dimension, values)
        if values and not allowed:
            self.stop(dimension)
        return allowed
