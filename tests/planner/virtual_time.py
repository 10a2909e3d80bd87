"""Megatron's own schedules, as they are, on clocks that only computations and transfers move.

Every rank is a thread with a clock. A transfer begins when both of its ranks have posted it and the one before it in
its stream has ended; a rank that waits for it goes on when it has ended. Tensors hold the number of the chunk that
computed them, which tells how long their transfer takes.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from megatron.core.enums import ModelType
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.pipeline_parallel import schedules, utils
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.process_groups_config import ProcessGroupCollection
from torch.overrides import TorchFunctionMode

from megatron_2bw.planner.pipeline.periods import Pipeline, Stage

_PATIENCE_S = 20
"""For another rank, of real time: what no rank posts is a deadlock."""


def batch_s(pipeline: Pipeline, *, overlaps: bool = True, waits: bool = True) -> float:
    """Seconds of Megatron's forwards and backwards of a batch.

    Args:
        pipeline: what every chunk and every transfer takes.
        overlaps: without ``--no-overlap-p2p-communication``.
        waits: for what forwards send, before its memory is freed.
    """
    links = _Links()
    ranks = [_Rank(rank, pipeline, links, overlaps=overlaps, waits=waits) for rank in range(pipeline.stages)]
    with (
        mock.patch.object(utils, "get_pg_rank", lambda group: group.rank()),
        mock.patch.object(utils, "get_pg_size", lambda group: group.size()),
        ThreadPoolExecutor(pipeline.stages) as threads,
    ):
        runs = [threads.submit(rank.run) for rank in ranks]
    return max(run.result() for run in runs)


class _Links:
    """Streams of transfers, each of which carries one at a time, in the order in which both of its ranks post them."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.transfers: dict[Any, list[SimpleNamespace]] = {}

    def post(self, stream: Any, **end: Any) -> SimpleNamespace:
        """The next transfer that lacks this end: ``by`` whom, and ``sent_s`` and ``takes_s`` or ``posted_s``."""
        with self.changed:
            queue = self.transfers.setdefault(stream, [])
            index = next((at for at, one in enumerate(queue) if end["by"] not in one.by), len(queue))
            if index == len(queue):
                queue.append(SimpleNamespace(by=set(), ended_s=None))
            one = queue[index]
            one.by.add(end.pop("by"))
            assert not end.keys() & vars(one).keys(), "two sends, or two receives, meet"
            vars(one).update(end)
            before_s = queue[index - 1].ended_s if index else 0
            for later in queue[index:]:
                if len(later.by) < 2 or before_s is None:
                    break
                before_s = later.ended_s = max(later.sent_s, later.posted_s, before_s) + later.takes_s
            self.changed.notify_all()
            return one

    def ended_s(self, one: SimpleNamespace) -> Any:
        """Once both ends are there."""
        with self.changed:
            if not self.changed.wait_for(lambda: one.ended_s is not None, _PATIENCE_S):
                raise TimeoutError(f"no other end of {one}")
        return one.ended_s


class _Rank(P2PCommunicator):
    """A rank's clock, and its end of all transfers."""

    def __init__(self, rank: int, pipeline: Pipeline, links: _Links, *, overlaps: bool, waits: bool) -> None:
        self.pipeline, self.links, self.now_s = pipeline, links, 0
        chunks = max(len(pipeline.each) // pipeline.stages, 1)
        self.virtual_pipeline_model_parallel_size = chunks if chunks > 1 else None
        self.pp_group = _group(rank, pipeline.stages)
        self.config = ModelParallelConfig(
            pipeline_model_parallel_size=pipeline.stages,
            virtual_pipeline_model_parallel_size=self.virtual_pipeline_model_parallel_size,
            pipeline_dtype=torch.float32,
            deallocate_pipeline_outputs=waits,
            overlap_p2p_comm=overlaps and chunks > 1,
            batch_p2p_comm=not (overlaps and chunks > 1),
        )
        vars(self.config).update(hidden_size=1, num_moe_experts=None, mtp_num_layers=None)
        each = pipeline.each or tuple(pipeline.in_order)
        self.chunks = [_Chunk(stage, each[stage], self) for stage in range(rank, len(each), pipeline.stages)]

    def run(self) -> float:
        """A batch, by Megatron's function; when it has ended."""
        groups = ProcessGroupCollection()
        groups.tp = groups.cp = _group(0, 1)
        inputs = {"num_microbatches": self.pipeline.microbatches, "seq_length": 1, "micro_batch_size": 1}
        inputs |= {"p2p_communicator": self, "pg_collection": groups, "forward_step_func": _step}
        with _OnCPU():
            if len(self.chunks) == 1:
                inputs |= {"model": self.chunks[0], "data_iterator": None}
                schedules.forward_backward_pipelining_without_interleaving(**inputs)
            else:
                inputs |= {"model": self.chunks, "data_iterator": [None] * len(self.chunks)}
                schedules.forward_backward_pipelining_with_interleaving(**inputs)
        return self.now_s

    def _communicate(self, *, tensor_send_next, tensor_send_prev, recv_prev, recv_next, wait_on_reqs=True, **_):
        rank, stages, links_s = self.pp_group.rank(), self.pipeline.stages, self.pipeline.links_s
        posted = {}
        if tensor_send_next is not None:
            takes_s = links_s[int(tensor_send_next)]
            posted["send_next"] = self._post(rank, (rank + 1) % stages, sent_s=self.now_s, takes_s=takes_s)
        if tensor_send_prev is not None:
            takes_s = links_s[int(tensor_send_prev) - 1]
            posted["send_prev"] = self._post(rank, (rank - 1) % stages, sent_s=self.now_s, takes_s=takes_s)
        if recv_prev:
            posted["recv_prev"] = self._post((rank - 1) % stages, rank, posted_s=self.now_s)
        if recv_next:
            posted["recv_next"] = self._post((rank + 1) % stages, rank, posted_s=self.now_s)
        handles = {name: SimpleNamespace(wait=lambda one=one: self._wait(one)) for name, one in posted.items()}
        if wait_on_reqs:
            while handles:
                handles.popitem()[1].wait()
        received = [torch.zeros(1, 1, 1, requires_grad=True) if one else None for one in (recv_prev, recv_next)]
        return *received, handles

    def _post(self, sender: int, receiver: int, **end: Any) -> SimpleNamespace:
        """NCCL has a stream per pair of ranks; transfers of a batch, and of two ranks alone, have one each way."""
        is_alone = self.pipeline.stages == 2 or self.config.batch_p2p_comm
        stream = (sender, receiver) if is_alone else frozenset((sender, receiver))
        return self.links.post(stream, by=self.pp_group.rank(), **end)

    def _wait(self, one: SimpleNamespace) -> None:
        self.now_s = max(self.now_s, self.links.ended_s(one))


class _Chunk(torch.nn.Module):
    """Computes its own number, and moves its rank's clock."""

    model_type = ModelType.encoder_or_decoder

    def __init__(self, number: int, takes: Stage, rank: _Rank) -> None:
        super().__init__()
        self.number, self.takes, self.rank, self.config, self.given = number, takes, rank, rank.config, None
        self.weight = torch.nn.Parameter(torch.ones(1, 1, 1))

    def set_input_tensor(self, given: Any) -> None:
        self.given = given[0] if isinstance(given, list) else given

    def forward(self) -> torch.Tensor:
        return _Computed.apply(self.weight if self.given is None else self.given, self)


class _Computed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, given: torch.Tensor, chunk: _Chunk) -> torch.Tensor:
        ctx.chunk = chunk
        chunk.rank.now_s += chunk.takes.forward_s
        return torch.full_like(given, chunk.number)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.chunk.rank.now_s += ctx.chunk.takes.backward_s
        return torch.full_like(gradient, ctx.chunk.number), None


class _OnCPU(TorchFunctionMode):
    """Of what Megatron asks for on a GPU."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **{key: "cpu" if key == "device" else value for key, value in (kwargs or {}).items()})


def _step(_: Any, chunk: _Chunk) -> tuple[torch.Tensor, Any]:
    return chunk(), lambda output: (output.sum(), {})


def _group(rank: int, size: int) -> SimpleNamespace:
    return SimpleNamespace(rank=lambda: rank, size=lambda: size)
