"""How long actions take."""

from __future__ import annotations

from dataclasses import dataclass, fields
from fractions import Fraction

from megatron_2bw.schedule.action import ActionType, Reduction

Seconds = int | float | Fraction
"""Any exact or floating number; the engine only adds and compares, so exact input gives exact output."""

_FIELDS = {ActionType.FORWARD: "forward_s", ActionType.BACKWARD: "backward_s", ActionType.UPDATE: "update_s"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Durations:
    """How long actions take; forward, backward and update may differ per stage."""

    forward_s: Seconds | tuple[Seconds, ...]
    backward_s: Seconds | tuple[Seconds, ...]
    update_s: Seconds | tuple[Seconds, ...] = 0
    send_s: Seconds | tuple[Seconds, ...] = 0
    """From the end of the action that produced a tensor to its arrival; a channel carries one tensor at a time. May
    differ per boundary, between a stage and the next."""
    gradients_s: Seconds = 0
    """Of this reduction, from the moment its last rank is ready; so are the next two."""
    embedding_s: Seconds = 0
    norm_s: Seconds = 0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if min(value if isinstance(value, tuple) else (value,), default=-1) < 0:
                raise ValueError(f"{field.name} = {value}; give 0 or more, for all stages or per stage")

    def of_stage(self, type_: ActionType, stage: int, stages: int) -> Seconds:
        """Duration of a forward, backward or update of ``stage``."""
        name = _FIELDS[type_]
        value = getattr(self, name)
        if not isinstance(value, tuple):
            return value
        if len(value) != stages:
            raise ValueError(f"{name} has {len(value)} values for {stages} stages; give one per stage or a single one")
        return value[stage]

    def of_transfer(self, boundary: int, stages: int) -> Seconds:
        """Duration of a transfer between stages ``boundary`` and ``boundary + 1``, either way."""
        if not isinstance(self.send_s, tuple):
            return self.send_s
        if len(self.send_s) != stages - 1:
            raise ValueError(
                f"send_s has {len(self.send_s)} values for {stages} stages; give one per boundary or a single one"
            )
        return self.send_s[boundary]

    def of_reduction(self, kind: Reduction) -> Seconds:
        """Duration of a reduction of this kind."""
        return {
            Reduction.GRADIENTS: self.gradients_s,
            Reduction.EMBEDDING: self.embedding_s,
            Reduction.NORM: self.norm_s,
        }[kind]
