"""The second stage of a rank in a bidirectional pipeline: the mirrored one, of another copy of the model.

Rank r has stage r of the pipeline that goes down, which is Megatron's own, with optimizer and checkpoints. It
also has stage d-1-r of the pipeline that goes up, which only lends its computation: before a batch it gets the
weights of rank d-1-r, and behind the rank's last backward it gives that rank its gradients.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from torch.utils import _pytree

from megatron_2bw.mcore import groups
from megatron_2bw.mcore.stages.random_state import RandomState
from megatron_2bw.mcore.symbols import replace
from megatron_2bw.mcore.updates.stock_optimizer import buffers_of
from megatron_2bw.runtime.errors import needs_peers


def build(provide: Callable[[], Any]) -> Any:
    """What ``provide`` makes of this rank's mirrored place; draws no random numbers of the run. Collective."""
    group = groups.create_mirrored_group()
    in_mirrored = replace(parallel_state, "_PIPELINE_MODEL_PARALLEL_GROUP", group)
    with in_mirrored, at_stage(group.rank()), RandomState.present().shown():
        return provide()


def collection(given: ProcessGroupCollection) -> ProcessGroupCollection:
    """``given`` while something is built: with the mirrored pipeline."""
    mirrored = copy.copy(given)
    mirrored.pp = parallel_state.get_pipeline_model_parallel_group()
    return mirrored


def at_stage(stage: int) -> AbstractContextManager[object]:
    """Inside, Megatron takes this rank for that of ``stage``: what it reads, and whether it has a loss."""
    return replace(parallel_state, "_MPU_PIPELINE_MODEL_PARALLEL_RANK", stage)


class Mirror:
    """The mirrored stage, and what passes between the two ranks that have copies of one stage.

    Memory: the weights and gradients of the mirrored stage, and one more buffer of gradients to receive in.
    Communication: per batch, each rank sends the weights of one stage and the gradients of another.

    Args:
        model: this rank's stage, in Megatron's DistributedDataParallel.
        mirrored: its stage of the other pipeline, likewise.
        timeout: of every transfer.
    """

    def __init__(self, model: torch.nn.Module, mirrored: torch.nn.Module, timeout: timedelta) -> None:
        self.model = mirrored
        self._own = model
        self._groups = groups.create_mirror_groups(timeout)
        self._received = [torch.empty_like(gradients) for gradients in _gradients(model)]
        self._works: list[dist.Work] = []

    def begin(self) -> None:
        """Before a batch: show the newest weights to both copies, accumulate from zero."""
        self.model.zero_grad_buffer()
        with needs_peers("the weights of the mirrored stage"):
            for work in self._swap(_weights(self._own), _weights(self.model)):
                work.wait()

    def start_gradients(self) -> None:
        """After the rank's last backward.

        Not after that of the mirrored stage: on a GPU, the transfer runs from here on until the rank that gets these
        gradients has come as far, and what waits for the whole device, as the first use of a kernel may, would wait
        for that. With 6 stages of mixpipe that rank waits for this one.
        """
        self._works = self._swap(_gradients(self.model), self._received)

    def add_gradients(self) -> None:
        """Add those of the other copy to this rank's own; every gradient is there."""
        with needs_peers("the gradients of the other copy of this stage"):
            for work in self._works:
                work.wait()
        for own, received in zip(_gradients(self._own), self._received, strict=True):
            own += received

    def exchange(self, found: Any) -> Any:
        """Give the other rank what was found in the mirrored stage, and get what it has found; both on the host."""
        peer, group = self._groups.peer, self._groups.host
        result = [None]
        with needs_peers("losses of the mirrored stage"):
            if dist.get_rank() < peer:
                dist.send_object_list([_on_host(found)], dst=peer, group=group)
                dist.recv_object_list(result, src=peer, group=group)
            else:
                dist.recv_object_list(result, src=peer, group=group)
                dist.send_object_list([_on_host(found)], dst=peer, group=group)
        return result[0]

    def _swap(self, given: list[torch.Tensor], received: list[torch.Tensor]) -> list[dist.Work]:
        """Start to transfer both ways; in one piece, as NCCL could otherwise wait for the one in the other."""
        peer, group = self._groups.peer, self._groups.device
        return dist.batch_isend_irecv(
            [
                *(dist.P2POp(dist.isend, tensor, peer, group) for tensor in given),
                *(dist.P2POp(dist.irecv, tensor, peer, group) for tensor in received),
            ]
        )


def _weights(model: torch.nn.Module) -> list[torch.Tensor]:
    return [parameter.data for parameter in model.parameters()]


def _gradients(model: Any) -> list[torch.Tensor]:
    """Accumulation buffers of a stage; the same for every copy of it."""
    return [buffer.grad_data for buffer in buffers_of(model)]


def _on_host(found: Any) -> Any:
    return _pytree.tree_map_only(torch.Tensor, torch.Tensor.cpu, found)


class MicrobatchData:
    """An iterator over the microbatches of one batch, for a rank that reads them in another order.

    Args:
        data: Megatron's iterator, in order.
        microbatches: in the batch.
    """

    def __init__(self, data: Any, microbatches: int) -> None:
        self._data = data
        self._microbatches = microbatches
        self._read = 0
        self._waiting: dict[int, Any] = {}
        self._wanted = 0

    def at(self, microbatch: int) -> MicrobatchData:
        """The iterator, at that microbatch."""
        self._wanted = microbatch
        return self

    def __iter__(self) -> MicrobatchData:
        return self

    def __next__(self) -> Any:
        while self._read <= self._wanted:
            self._waiting[self._read] = next(self._data)
            self._read += 1
        if self._wanted not in self._waiting:
            raise RuntimeError(
                f"microbatch {self._wanted} was read already: where two stages read from one iterator, a forward "
                "step may call next() once"
            )
        return self._waiting.pop(self._wanted)

    def end(self) -> None:
        """Leave the iterator at the next batch, if this rank reads at all."""
        if self._read:
            for _ in range(self._read, self._microbatches):
                next(self._data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._data, name)
