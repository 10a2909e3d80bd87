"""A training run on a simulated GPU."""

from __future__ import annotations

import contextlib
import functools
import pickle
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.timers import Timers
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_iter

from megatron_2bw.mcore.monitoring.timers import CallTimers
from megatron_2bw.mcore.stages.stage import DelayedStage
from megatron_2bw.runtime.links import Links
from megatron_2bw.runtime.pace import Pace

from ..case import Case
from ..worker import install, set_environment, train
from .device import Device, Event, Stream, Use
from .order import Seen
from .progress import Step

_CUDA = torch.device("cuda")
_Work = torch._C._distributed_c10d.Work


class Watched(NamedTuple):
    """What was found on one rank."""

    races: list[str]
    """Accesses to memory that are in no order."""
    steps: list[Step]
    """In the order in which they were launched."""
    waits: Counter[str]
    """Of the main thread, by who waited."""


def watch(case: Case, rank: int, port: int, folder: Path, flaw: str | None = None) -> None:
    """Run ``case`` on a simulated GPU and write what was found.

    Args:
        flaw: one of ``FLAWS``, to be found.
    """
    set_environment(rank, case.ranks, port)
    install(case)
    with simulated() as device:
        if flaw is not None:
            where, name, other = FLAWS[flaw]
            assert hasattr(where, name), "a flaw takes the place of something"
            setattr(where, name, other)
        train(case, rank, folder)
    # As bytes, since torch asks of every object that it pickles whether it is a tensor.
    found = pickle.dumps(Watched(device.races, device.steps, device.waits))
    torch.save(found, folder / f"rank{rank}.pt")


def _no_wait(*args: object, **kwargs: object) -> None: ...


def _one_group(links: Links, *args: Any) -> Any:
    *transfer, _ = args
    return _started(links, *transfer, next(iter(links._groups)))


_started = Links._started


def _waits_for_the_device(pace: Pace) -> None:
    torch.cuda.synchronize()


FLAWS = {
    "a stream does not wait for another": (Stream, "wait_stream", _no_wait),
    "a stream does not wait for an event": (Stream, "wait_event", _no_wait),
    "the host does not wait for an event": (Event, "synchronize", _no_wait),
    "a stream does not wait for a transfer": (Device, "waited", _no_wait),
    "a batch does not wait for the sum of gradients": (DelayedStage, "reduce_wait", _no_wait),
    "one group for both ways": (Links, "_started", _one_group),
    "timers wait for the device": (CallTimers, "__call__", Timers.__call__),
    "computations wait for the device": (Pace, "computed", _waits_for_the_device),
}
"""What breaks a run on a GPU, and none on a CPU: what has which attribute in place of its own."""


@contextlib.contextmanager
def simulated() -> Iterator[Device]:
    """Inside, this process has a simulated GPU; the CPU backend must be installed. To be left by its end."""
    from megatron_2bw.mcore import groups
    from megatron_2bw.mcore.loop import session
    from megatron_2bw.runtime import background, executor, update

    device = Device()
    torch.cuda.Stream, torch.cuda.Event = functools.partial(Stream, device), functools.partial(Event, device)
    torch.cuda.current_stream = lambda _=None: device.stream
    torch.cuda.set_stream = functools.partial(setattr, device, "stream")
    torch.cuda.stream = functools.partial(_current, device)
    torch.cuda.synchronize = lambda _=None: device.synchronize_all()
    torch.cuda.device = contextlib.nullcontext
    torch.Tensor.cpu = functools.partialmethod(_copied_to_host, device)
    _Work.wait = _after(_Work.wait, lambda work: device.waited(work))
    _Work.is_completed = _after(_Work.is_completed, device.found_done, if_true=True)
    dist.batch_isend_irecv = _together(dist.batch_isend_irecv, device)
    groups._clones = _known_on_host(groups._clones, device)
    background.SimpleQueue, background.Future = functools.partial(_Queue, device), functools.partial(_Future, device)
    background.Background._work = _watched(background.Background._work, device)
    executor.Pace, session.Recorder = _on_gpu(executor.Pace), _on_gpu(session.Recorder)
    update.Background = _on_gpu(update.Background)
    with _Watch(device):
        yield device


class _Watch(TorchDispatchMode):
    """Tells a device of all operations of one thread."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self._device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        (self._transferred if func.namespace == "c10d" else self._computed)(func, args, kwargs or {}, result)
        return result

    def _computed(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        uses, schema = [], func._schema
        for argument, value in _arguments(schema, args, kwargs):
            alias = argument.alias_info
            if alias is None or alias.is_write:  # Else a view, which touches nothing.
                uses += [Use(tensor, alias is not None) for tensor in _tensors(value)]
        results = result if len(schema.returns) > 1 else (result,)
        made = [
            tensor
            for returned, value in zip(schema.returns, results, strict=False)
            if returned.alias_info is None
            for tensor in _tensors(value)
        ]
        if "empty" in schema.name:
            for tensor in made:
                self._device.hand_out(tensor)
            return
        uses += [Use(tensor, True) for tensor in made]
        if uses:
            self._device.launch(self._device.stream.line, uses, schema.name)
        if func is torch.ops.aten._local_scalar_dense.default:
            self._device.stream.synchronize()

    def _transferred(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        schema, uses, given = func._schema, [], {}
        for argument, value in _arguments(schema, args, kwargs):
            given[argument.name] = value
            is_read = argument.name.startswith("input") or schema.name == "c10d::send"
            uses += [Use(tensor, not is_read) for tensor in _tensors(value)]
        group = dist.ProcessGroup.unbox(given["process_group"])
        ends = {"c10d::send": (group.rank(), given.get("dst")), "c10d::recv_": (given.get("src"), group.rank())}
        line = self._device.transfer(group, ends.get(schema.name), uses, schema.name)
        for value in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(value, torch.ScriptObject):
                self._device.began(_Work.unbox(value), line)


class _Queue:
    """A queue of the host: who takes something out comes after who has put it in."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._queue: SimpleQueue[tuple[Any, Seen]] = SimpleQueue()

    def put(self, item: Any) -> None:
        self._queue.put((item, self._device.host.seen()))

    def get(self) -> Any:
        item, seen = self._queue.get()
        self._device.host.after(seen)
        return item


class _Future(Future):
    """Whoever has its result comes after whoever has set it."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self._device = device
        self._seen: Seen = {}

    def set_result(self, result: Any) -> None:
        self._seen = self._device.host.seen()
        super().set_result(result)

    def result(self, timeout: float | None = None) -> Any:
        found = super().result(timeout)
        self._device.host.after(self._seen)
        return found


@contextlib.contextmanager
def _current(device: Device, stream: Stream) -> Iterator[None]:
    before, device.stream = device.stream, stream
    try:
        yield
    finally:
        device.stream = before


def _copied_to_host(tensor: torch.Tensor, device: Device) -> torch.Tensor:
    copy = tensor.clone()
    device.stream.synchronize()
    return copy


def _after(method: Callable[..., Any], told: Callable[[Any], None], *, if_true: bool = False) -> Callable[..., Any]:
    @functools.wraps(method)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():  # Gloo copies in here.
            result = method(self, *args, **kwargs)
        if result or not if_true:
            told(self)
        return result

    return wrapper


def _together(transfers: Callable[..., Any], device: Device) -> Callable[..., Any]:
    @functools.wraps(transfers)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        with device.together():
            return transfers(*args, **kwargs)

    return wrapper


def _known_on_host(clones: Callable[..., Any], device: Device) -> Callable[..., Any]:
    @functools.wraps(clones)
    def wrapper(groups: Any, timeout: Any, description: str, backend: str | None = None, **options: Any) -> Any:
        made = clones(groups, timeout, description, backend, **options)
        if backend == "gloo":
            device.host_groups.update(made.values())
        return made

    return wrapper


def _watched(work: Callable[..., None], device: Device) -> Callable[..., None]:
    def wrapper(self: Any) -> None:
        with _Watch(device):
            work(self)

    return wrapper


def _on_gpu(make: Callable[..., Any]) -> Callable[..., Any]:
    """In place of the CPU, which is what tensors say that they are on."""
    return lambda device, *args, **kwargs: make(_CUDA, *args, **kwargs)


def _arguments(schema: torch.FunctionSchema, args: Any, kwargs: Any) -> Iterator[tuple[torch.Argument, Any]]:
    yield from zip(schema.arguments, args, strict=False)
    for argument in schema.arguments:
        if argument.name in kwargs:
            yield argument, kwargs[argument.name]


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in tree_iter(value) if isinstance(leaf, torch.Tensor) and leaf.device.type == "cpu")
