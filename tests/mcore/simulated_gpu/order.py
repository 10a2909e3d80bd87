"""Which accesses to memory nothing puts in an order, found with vector clocks.

Source: Lamport, "Time, clocks, and the ordering of events in a distributed system" (1978); Fidge (1988) and Mattern
(1989) for vectors of clocks. ``torch.cuda._sanitizer`` does the same on a GPU, with the first address of a tensor in
place of its bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

type Seen = dict[Line, int]
"""By line, its last step that is over."""


class Line:
    """What happens one after the other: on a host thread, or in a stream.

    It counts its steps, and knows of every other line the last step that is over, whatever the speeds, before its own
    next one begins.

    Args:
        name: for messages; of the rank's lines, no other has it.
        on_host: not in a stream.
    """

    def __init__(self, name: str, *, on_host: bool = False) -> None:
        self.name = name
        self.on_host = on_host
        self._steps = 0
        self._seen: Seen = {}

    def step(self) -> int:
        """The number of the next step, which has begun."""
        self._steps += 1
        self._seen[self] = self._steps
        return self._steps

    def seen(self) -> Seen:
        """A copy: what is over before what this line does next, and all it has done itself."""
        return dict(self._seen)

    def after(self, seen: Seen) -> None:
        """What this line does from here on comes after all of that."""
        for line, step in seen.items():
            self._seen[line] = max(step, self._seen.get(line, 0))

    def is_after(self, access: Access) -> bool:
        """Whether what this line does next comes after ``access``."""
        return self._seen.get(access.line, 0) >= access.step


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """One step's use of some bytes of a piece of memory."""

    line: Line
    step: int
    first: int
    """Byte, from the start of the memory."""
    last: int
    """Byte after the last one."""
    writes: bool
    where: str
    """What did it, for messages."""

    def touches(self, other: Access) -> bool:
        """Whether both use a byte."""
        return self.first < other.last and other.first < self.last

    def covers(self, other: Access) -> bool:
        """Whether whatever comes after this one and in conflict with ``other`` is in conflict with this one, too."""
        return (
            self.first <= other.first
            and other.last <= self.last
            and (self.writes or (self.line is other.line and not other.writes))
        )

    def __str__(self) -> str:
        return f"{'write' if self.writes else 'read'} on {self.line.name} by {self.where}"


@dataclass(slots=True)
class Memory:
    """What was handed out at once, and who has used it.

    Two accesses to the same bytes of which one writes must be in order. So must every access and what the owner does
    after the memory was given back, as it may be in the same place.
    """

    owner: Line
    """The stream that it was handed out to; when given back, it serves that one again, without a wait."""
    accesses: list[Access] = field(default_factory=list)

    def use(self, access: Access) -> list[Access]:
        """Keep ``access``; returns those before it that nothing orders before it."""
        unordered = [
            earlier
            for earlier in self.accesses
            if (access.writes or earlier.writes) and access.touches(earlier) and not access.line.is_after(earlier)
        ]
        self.accesses = [earlier for earlier in self.accesses if not access.covers(earlier)]
        self.accesses.append(access)
        return unordered

    def under_way(self) -> list[Access]:
        """Those that may not be over when the owner goes on."""
        return [access for access in self.accesses if not self.owner.is_after(access)]

    @property
    def is_shared(self) -> bool:
        """Whether another line than the owner has used it."""
        return any(access.line is not self.owner for access in self.accesses)
