"""The simulated GPU of a process: its streams, and all that is launched on them."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from megatron_2bw.mcore.cpu.streams import CpuEvent, CpuStream

from .order import Access, Line, Memory, Seen
from .progress import Meeting, Step

_SWEEP_EVERY = 256
"""Launches; memory that one line alone uses can be given back at any time."""
_PACKAGES = ("megatron", "tests")


class Use(NamedTuple):
    """What a step does with a tensor."""

    tensor: torch.Tensor
    writes: bool


class Device:
    """What a process launches, and the accesses to memory among it that are in no order."""

    def __init__(self) -> None:
        self.races: list[str] = []
        self.steps: list[Step] = []
        self.waits: Counter[str] = Counter()
        """By who asked for it: how often the main thread has waited for the device, or read a tensor anywhere."""
        self.host_groups: set[dist.ProcessGroup] = set()
        """Whose collectives the host waits for."""
        self._lines: list[Line] = []
        self._lock = threading.RLock()
        self._here = threading.local()
        self._default = Stream(self)
        self._memory: dict[int, tuple[torch.UntypedStorage, Memory]] = {}
        """By storage; as long as it is kept here, its address is not handed out again."""
        self._shared: set[int] = set()
        self._given_back: dict[Line, list[Memory]] = {}
        """By owner, until that could have used it again."""
        self._links: dict[tuple[str, int | None], Line] = {}
        """By group, and by peer unless it is for collectives."""
        self._transfers: set[Line] = set()
        """What these use, torch keeps until they are waited for."""
        self._batch: list[tuple[Line, Line]] | None = None
        """Transfers that begin together, with the line that each belongs to."""
        self._works: dict[int, tuple[dist.Work, Seen]] = {}
        """Not waited for, with what has happened when they are done."""
        self._meetings: Counter[tuple[str, tuple[int, ...]]] = Counter()

    @property
    def host(self) -> Line:
        """Of the calling thread."""
        if not hasattr(self._here, "line"):
            self._here.line = self.new_line(threading.current_thread().name, on_host=True)
        return self._here.line

    @property
    def stream(self) -> Stream:
        """The current one of the calling thread."""
        return getattr(self._here, "stream", self._default)

    @stream.setter
    def stream(self, stream: Stream) -> None:
        self._here.stream = stream

    def new_line(self, name: str, *, on_host: bool = False) -> Line:
        """With a name that no other has."""
        with self._lock:
            line = Line(f"{name} ({len(self._lines)})", on_host=on_host)
            self._lines.append(line)
        return line

    def launch(self, line: Line, uses: list[Use], what: str, meeting: Meeting | None = None) -> None:
        """A step of ``line`` that reads and writes tensors."""
        with self._lock:
            self._look_for_memory_given_back(everywhere=len(self.steps) % _SWEEP_EVERY == 0)
            line.after(self.host.seen())
            where = f"{what}, {_caller()}"
            after = {other.name: number for other, number in line.seen().items()}
            step = line.step()
            self.steps.append(Step(line.name, step, after, meeting, line.on_host, where))
            self.races += [
                f"{where}, in memory that was given back, not after the {access}"
                for memory in self._given_back.pop(line, ())
                for access in memory.under_way()
                if access.line not in self._transfers
            ]
            for tensor, writes in uses:
                extent = _extent(tensor)
                if extent is None:
                    continue
                key, memory = self._memory_of(tensor)
                access = Access(line=line, step=step, first=extent[0], last=extent[1], writes=writes, where=where)
                self.races += [f"{access}, not after the {earlier}" for earlier in memory.use(access)]
                if memory.is_shared:
                    self._shared.add(key)

    def hand_out(self, tensor: torch.Tensor) -> None:
        """``tensor`` is new, and no one has written it."""
        with self._lock:
            if tensor.untyped_storage().nbytes():
                self._memory_of(tensor)

    def transfer(self, group: dist.ProcessGroup, ends: tuple[int, int] | None, uses: list[Use], what: str) -> Line:
        """A collective, or a transfer, that the current stream has begun; returns the line that it is on.

        Args:
            ends: ranks in ``group`` that send and receive; None for a collective.
        """
        ranks = tuple(dist.get_process_group_ranks(group))
        members = ranks if ends is None else tuple(ranks[end] for end in ends)
        counted = group.group_name, members
        meeting = Meeting(*counted, self._meetings[counted])
        self._meetings[counted] += 1
        what = f"{what} of ranks {members} ({group.group_desc})"
        if group in self.host_groups:
            self.host.after(self.stream.line.seen())
            self.launch(self.host, uses, what, meeting)
            return self.host
        peer = None if ends is None else ends[ends[0] == group.rank()]
        key = group.group_name, peer
        if key not in self._links:
            self._links[key] = self.new_line(f"{'group' if peer is None else 'link'} {group.group_desc}")
        line = self._links[key]
        if self._batch is not None:
            alone = self.new_line(line.name)
            alone.after(line.seen())
            self._batch.append((alone, line))
            line = alone
        self._transfers.add(line)
        line.after(self.stream.line.seen())
        self.launch(line, uses, what, meeting)
        return line

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Transfers that are begun inside do not wait for each other."""
        self._batch = []
        try:
            yield
        finally:
            for alone, line in self._batch:
                line.after(alone.seen())
            self._batch = None

    def began(self, work: dist.Work, line: Line) -> None:
        """``work`` is done when ``line`` has done what it has been given."""
        with self._lock:
            self._works[id(work)] = work, line.seen()

    def waited(self, work: dist.Work) -> None:
        """The current stream goes on when ``work`` is done."""
        with self._lock:
            _, seen = self._works.pop(id(work), (None, None))
        if seen is not None:
            self.stream.go_on_after(seen, "wait for a transfer")

    def found_done(self, work: dist.Work) -> None:
        """The host knows that ``work`` is done."""
        with self._lock:
            _, seen = self._works.get(id(work), (None, {}))
            self.host.after(seen)

    def synchronize(self, seen: Seen) -> None:
        """The host has waited for all of that."""
        if threading.current_thread() is threading.main_thread():
            self.waits[_caller()] += 1
        with self._lock:
            self._look_for_memory_given_back()
            self.host.after(seen)

    def synchronize_all(self) -> None:
        """The host has waited for everything launched, transfers included."""
        with self._lock:
            for line in self._lines:
                if not line.on_host:
                    self.synchronize(line.seen())

    def _memory_of(self, tensor: torch.Tensor) -> tuple[int, Memory]:
        storage = tensor.untyped_storage()
        _, memory = self._memory.setdefault(storage._cdata, (storage, Memory(self.stream.line)))
        return storage._cdata, memory

    def _look_for_memory_given_back(self, *, everywhere: bool = False) -> None:
        """Where the program holds it no longer; if not everywhere, where it matters at once."""
        for key in list(self._memory if everywhere else self._shared):
            storage, memory = self._memory[key]
            if _holders(storage) > _ALONE:
                continue
            del self._memory[key]
            self._shared.discard(key)
            self._given_back.setdefault(memory.owner, []).append(memory)


class Stream(CpuStream):
    """Takes the place of ``torch.cuda.Stream``."""

    def __init__(self, simulated: Device, /, *args: object, **kwargs: object) -> None:
        self._device = simulated
        self.line = simulated.new_line("stream")

    def go_on_after(self, seen: Seen, what: str) -> None:
        """What is launched from here on comes after all of that; as is the wait itself."""
        self.line.after(seen)
        self._device.launch(self.line, [], what)

    def wait_stream(self, stream: Stream) -> None:
        self.wait_event(stream.record_event())

    def wait_event(self, event: Event) -> None:
        self.go_on_after(event.seen, "wait for an event")

    def synchronize(self) -> None:
        self._device.synchronize(self.line.seen())

    def record_event(self, event: Event | None = None) -> Event:
        event = Event(self._device) if event is None else event
        event.record(self)
        return event


class Event(CpuEvent):
    """Takes the place of ``torch.cuda.Event``."""

    def __init__(self, device: Device, *args: object, **kwargs: object) -> None:
        super().__init__()
        self._device = device
        self.seen: Seen = {}

    def record(self, stream: Stream | None = None) -> None:
        super().record()
        line = (self._device.stream if stream is None else stream).line
        self._device.launch(line, [], "an event")
        self.seen = line.seen()

    def wait(self, stream: Stream | None = None) -> None:
        (self._device.stream if stream is None else stream).wait_event(self)

    def synchronize(self) -> None:
        self._device.synchronize(self.seen)


def _extent(tensor: torch.Tensor) -> tuple[int, int] | None:
    """First byte and the one after the last; None if there is none."""
    if tensor.numel() == 0:
        return None
    first, size = tensor.storage_offset(), tensor.element_size()
    if tensor.is_contiguous():
        return first * size, (first + tensor.numel()) * size
    strides = zip(tensor.shape, tensor.stride(), strict=True)
    return first * size, (first + 1 + sum((length - 1) * stride for length, stride in strides)) * size


def _caller() -> str:
    """The innermost line of ours or of Megatron's."""
    frame = sys._getframe(1)
    while frame is not None:
        name = _place_of(frame.f_code.co_filename)
        if name is not None:
            return f"{name}:{frame.f_lineno} ({frame.f_code.co_name})"
        frame = frame.f_back
    return "outside"


@functools.cache
def _place_of(path: str) -> str | None:
    """A file's name; None for those that are of no interest."""
    file = Path(path)
    is_known = any(part.startswith(_PACKAGES) for part in file.parts)
    return file.name if is_known and file.parent != Path(__file__).parent else None


def _holders(storage: torch.UntypedStorage) -> int:
    return torch._C._storage_Use_Count(storage._cdata)


_ALONE = _holders(torch.empty(1).untyped_storage())
