"""Starts the ranks of a case, watches over them and collects what they recorded."""

from __future__ import annotations

import contextlib
import functools
import math
import multiprocessing
import os
import re
import signal
import socket
import sys
import tempfile
import time
import unittest.mock
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from .case import Case
from .record import RankRecord
from .shards import assemble

TIMEOUT_S, ON_GPU_S = 120.0, 60.0
"""What a job may take; the second one where cores are many, and a report has nine minutes for all."""
_TAIL_CHARACTERS = 4000
_TRIAL_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How the processes of a job ended."""

    exit_codes: list[int | None]
    """None: had to be killed."""
    outputs: list[str]
    """Standard output and error of every rank."""
    seconds: float

    def tails(self) -> str:
        """The ends of all outputs, for a test's message."""
        return "\n".join(
            f"--- rank {rank}, exit code {code}\n{text[-_TAIL_CHARACTERS:]}"
            for rank, (code, text) in enumerate(zip(self.exit_codes, self.outputs, strict=True))
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """What a run computed, the same form for every layout."""

    losses: torch.Tensor
    """(replicas x context-parallel ranks, batches, microbatches), float32."""
    validation_losses: torch.Tensor
    """(replicas x context-parallel ranks, validation microbatches), float32."""
    seeds: torch.Tensor
    """The shape of ``losses``, float32: gradient of the summed loss, into which the loss scale enters."""
    norms: torch.Tensor
    """(batches,), float64: global gradient norm before clipping; nan where the update was skipped."""
    norms_apart: torch.Tensor
    """The same of the weights that are clipped by a norm of their own; 0 where there are none."""
    rates: list[tuple[tuple[float, float], ...]]
    """Per update that was not skipped: learning rate and weight decay of the parameter groups."""
    initial: dict[str, torch.Tensor]
    final: dict[str, torch.Tensor]
    """By global name."""
    main: dict[str, torch.Tensor]
    """Final main weights; empty in fp32, where they are the model's."""
    gradients: dict[str, torch.Tensor]
    """(updates, shape of the weight): reduced, unscaled, clipped; empty unless the case wants them."""
    actions: list[list[tuple[str, float, float]]]
    """Per rank: text form of the action, start and end in seconds."""
    sleeps: list[list[tuple[float, float]]]
    """Per rank: start and end in seconds."""
    outputs: list[str]
    """Standard output and error of every rank."""


@functools.cache
def run(case: Case) -> Results:
    """The results of ``case``; each distinct case runs once per session."""
    from .worker import main

    return merge(collect(main, case), case)


def refusal_in(error: Exception) -> str | None:
    """What we said in place of training, where that is why a run failed."""
    found = re.search(r"^megatron_2bw: error: (.*)$", str(error), re.MULTILINE)
    return found[1] if found and "Traceback" not in str(error) else None


def collect(target: Callable[..., None], case: Case, *, ranks: int | None = None) -> list[Any]:
    """Run ``target`` on all ranks and read what each wrote; a rank that fails fails the test."""
    ranks = ranks or case.ranks
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ended = launch(target, case, folder, ranks=ranks)
        if ended.exit_codes != [0] * ranks:  # None, where one did not end in time.
            raise RuntimeError(f"{case} failed after {ended.seconds:.0f} s\n{ended.tails()}")
        records = [
            torch.load(folder / f"rank{rank}.pt", map_location="cpu", weights_only=False) for rank in range(ranks)
        ]
    for record, output in zip(records, ended.outputs, strict=True):
        if isinstance(record, RankRecord):
            record.output = output
    return records


def launch(
    target: Callable[..., None], case: Case, folder: Path, *, ranks: int | None = None, timeout_s: float | None = None
) -> Ended:
    """Start one process per rank, wait for all and kill what still runs at the timeout."""
    ranks = ranks or case.ranks
    timeout_s = timeout_s or (ON_GPU_S if case.device == "cuda" else TIMEOUT_S)
    with _reserved_port() as port:
        processes = _started(case.device, [partial(_child, target, case, rank, port, folder) for rank in range(ranks)])
        start_s = time.monotonic()
        try:
            for process in processes:
                process.join(max(0.0, start_s + timeout_s - time.monotonic()))
            codes = [process.exitcode for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.join()
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # What a killed rank had started.
    logs = [folder / f"rank{rank}.log" for rank in range(ranks)]
    outputs = [log.read_text(errors="replace") if log.exists() else "" for log in logs]
    return Ended(exit_codes=codes, outputs=outputs, seconds=time.monotonic() - start_s)


def merge(records: list[Any], case: Case) -> Results:
    """One result from all ranks; what several ranks know must be the same on each."""
    first, rows = records[0], (-1, case.microbatches_per_row)
    for record in records:
        _require_equal("gradient norms", record.norms, first.norms)
        _require_equal("gradient norms of their own", record.norms_apart, first.norms_apart)
        _require_equal("learning rates", record.rates, first.rates)
    last = [record for record in records if record.stage == case.stages - 1]
    _put_in_order(records, last)
    return Results(
        losses=_per_replica("losses", last).unflatten(1, rows),
        validation_losses=_per_replica("validation_losses", last),
        seeds=_per_replica("seeds", last).unflatten(1, rows),
        norms=_per_batch(first.norms),
        norms_apart=_per_batch(first.norms_apart),
        rates=[tuple(sorted(rates)) for rates in first.rates.values()],
        initial=_single(record.initial for record in records),
        final=_single(record.final for record in records),
        main=_single(record.main for record in records),
        gradients=assemble(
            {shard: torch.stack(tensors) for shard, tensors in record.gradients.items()} for record in records
        ),
        actions=[record.actions for record in records],
        sleeps=[record.sleeps for record in records],
        outputs=[record.output for record in records],
    )


def _per_batch(norms: list[float | None]) -> torch.Tensor:
    return torch.tensor([math.nan if norm is None else norm for norm in norms], dtype=torch.float64)


def _put_in_order(records: list[Any], last: list[Any]) -> None:
    """The first rank of a bidirectional pipeline has the losses of odd microbatches."""
    for record in last:
        for other in records:
            same = (other.replica, other.tensor_rank) == (record.replica, record.tensor_rank)
            if same and other.stage != record.stage and other.losses:
                for name in ("losses", "seeds"):
                    pairs = zip(getattr(record, name), getattr(other, name), strict=True)
                    setattr(record, name, [scalar for pair in pairs for scalar in pair])


def _per_replica(name: str, records: list[Any]) -> torch.Tensor:
    """(replicas, scalars); the tensor-parallel ranks of a replica must agree."""
    by_replica: dict[int, torch.Tensor] = {}
    for record in sorted(records, key=lambda record: record.replica):
        scalars = getattr(record, name)
        found = torch.stack(scalars) if scalars else torch.zeros(0)
        if not torch.equal(by_replica.setdefault(record.replica, found), found):
            raise RuntimeError(f"{name} differ between tensor-parallel ranks")
    return torch.stack(list(by_replica.values()))


def _single(held: Iterable[dict[Any, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: tensor[0] for name, tensor in assemble(held).items()}


def _require_equal(what: str, found: Any, expected: Any) -> None:
    if found != expected:
        raise RuntimeError(f"{what} differ between ranks: {found} and {expected}")


@contextlib.contextmanager
def _reserved_port() -> Iterator[int]:
    """A port that no other job of this machine is given: rank 0 may listen on it, for both sides reuse addresses."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1", "CUDA_VISIBLE_DEVICES": ""}
"""Of every rank: one thread, nothing compiled, no GPU."""

ENVIRONMENT_ON_GPU = {
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
}
"""One thread per rank; transfers through the host that need no name of this machine; what Megatron asks for on most
GPUs; what torch and Transformer Engine need for results that repeat to the last bit; a look for GPUs after which a
process can still fork others that use them; nothing compiled, which takes longer than the rest of a run."""


def import_path() -> str:
    """A PYTHONPATH on which this package can be found."""
    root = Path(__file__).parents[len(__package__.split("."))]
    return os.pathsep.join([str(root), *filter(None, [os.environ.get("PYTHONPATH")])])


def _started(device: str, jobs: list[Callable[[], None]]) -> list[BaseProcess]:
    """A process for each job; on a GPU with what a test, or who runs it, has set otherwise in the environment."""
    environment = ENVIRONMENT
    if device == "cuda":
        environment = {name: os.environ.get(name, value) for name, value in ENVIRONMENT_ON_GPU.items()}
    server = _server(device, frozenset(environment.items()))
    if server is not None:
        return _forked(jobs, server)
    processes = [multiprocessing.get_context("spawn").Process(target=job) for job in jobs]
    with unittest.mock.patch.dict(os.environ, environment):
        for process in processes:
            process.start()
    return processes


@functools.cache
def _server(device: str, environment: frozenset[tuple[str, str]]) -> forkserver.ForkServer | None:
    """A process that has imported torch and Megatron, which takes seconds, and forks ranks.

    None where these could not use the GPU: a package that Megatron imports has used it before, as Transformer Engine
    does beside FlashAttention.
    """
    server = forkserver.ForkServer()
    server.set_forkserver_preload([f"{__package__}.preload"])
    with unittest.mock.patch.dict(os.environ, {**dict(environment), "PYTHONPATH": import_path()}):
        server.ensure_running()
    # It forks when it has imported everything, so no rank is waited for meanwhile.
    (trial,) = _forked([partial(torch.zeros, 1, device=device)], server)
    trial.join(_TRIAL_S)
    if device == "cuda" and trial.exitcode != 0:
        trial.kill()
        server._stop()
        return None
    return server


def _forked(jobs: list[Callable[[], None]], server: forkserver.ForkServer) -> list[BaseProcess]:
    processes = [multiprocessing.get_context("forkserver").Process(target=job) for job in jobs]
    with unittest.mock.patch.object(forkserver, "connect_to_new_process", server.connect_to_new_process):
        for process in processes:
            process.start()
    return processes


def _child(target: Callable[..., None], case: Case, rank: int, port: int, folder: Path) -> None:
    os.setsid()
    log = os.open(folder / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(log, stream.fileno())
    try:
        target(case, rank, port, folder)
    except Exception:
        # A forked process would print it by itself; a rank ends as Python ends a program.
        sys.excepthook(*sys.exc_info())
        sys.exit(1)
