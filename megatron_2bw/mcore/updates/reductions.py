"""What a captured batch still needs from other ranks before its update."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed.param_and_grad_buffer import shard_buffer
from megatron.core.distributed.reduce_scatter_with_fp32_accumulation import reduce_scatter_with_fp32_accumulation
from megatron.core.optimizer import clip_grads
from megatron.core.utils import get_attr_wrapped_model, get_model_config
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from megatron_2bw.mcore.groups import UpdateGroups
from megatron_2bw.mcore.updates.attention import AttentionLogits
from megatron_2bw.mcore.updates.routers import Routers
from megatron_2bw.mcore.updates.stock_optimizer import buffers_of
from megatron_2bw.runtime.errors import needs_peers
from megatron_2bw.runtime.gradients import CapturedGradients, Region
from megatron_2bw.schedule.action import Reduction

ReplicatedGradients = dict[dist.ReduceOp.RedOpType, list[torch.Tensor]]
"""By how to combine them."""


class Source(NamedTuple):
    """One accumulation buffer, or bucket, of Megatron's DistributedDataParallel."""

    region: Region
    scaling: float
    """Before the sum, where the sum is to be a mean."""
    group: dist.ProcessGroup
    """Megatron's group of the replicas; with several instances of the distributed optimizer, of those in this one."""
    instances: dist.ProcessGroup | None = None
    """Megatron's group of the ranks that have the same shard, one per instance; None for one instance."""

    @property
    def groups(self) -> list[dist.ProcessGroup]:
        """All that it is summed over."""
        return [self.group] if self.instances is None else [self.group, self.instances]


class Part(NamedTuple):
    """One of Megatron's chained optimizers: gradients whose norms are summed over one group."""

    gradients: list[torch.Tensor]
    """Captured; all that its parameters are updated with on this rank."""
    for_norms: list[list[torch.Tensor]]
    """Those that count in each of `Statistics.norms`, so that each weight counts once over all ranks."""
    group: dist.ProcessGroup
    """Megatron's group for gradient statistics."""


class Statistics(NamedTuple):
    """What all ranks know of a batch's gradients once the chain is through."""

    norms: tuple[float, ...]
    """L2 norms over the whole model, before clipping; loss scale removed. The first one is of all weights but those
    that have one of the others. 0 where stages are not together."""
    found_inf: bool
    """Whether a gradient is infinite or not a number; looked for only under loss scaling."""
    zeros: int | None
    """Number of zeros, where asked for."""


def sources_of(model: torch.nn.Module) -> list[Source]:
    """Accumulation buffers of a stage, by bucket where the distributed optimizer shards them."""
    sources = []
    instances = model.inter_dist_opt_group if model.ddp_config.num_distributed_optimizer_instances > 1 else None
    for buffer in buffers_of(model):
        if not model.ddp_config.use_distributed_optimizer:
            region = Region(buffer.grad_data, buffer.grad_data)
            sources.append(Source(region, buffer.gradient_scaling_factor, buffer.data_parallel_group))
            continue
        group = buffer.data_parallel_group
        for bucket in buffer.buckets:
            shard = shard_buffer(bucket.grad_data, group.size())[group.rank()]
            sources.append(Source(Region(bucket.grad_data, shard), bucket.gradient_scaling_factor, group, instances))
    return sources


class GradientReductions:
    """The links of the chain from captured gradients to their global statistics, each blocking.

    What Megatron does in ``finalize_model_grads``, in ``prepare_grads`` and in
    ``get_grad_norm_fp32``, with the same arithmetic, on the captured gradients and on groups of our
    own.

    Args:
        model: the stage, wrapped in Megatron's DistributedDataParallel.
        captured: its captured gradients, one region per source.
        sources: see ``sources_of``.
        parts: one per chained optimizer.
        replicated: see ``replicated_gradients``.
        groups: who takes part.
        routers: of the stage's experts.
        logits: of the stage's attention.
        at_once: whether Megatron takes a norm of all parts at once, not a norm of their norms, which rounds otherwise.
        count_zeros: whether to count zeros among the gradients.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        captured: CapturedGradients,
        sources: Sequence[Source],
        parts: Sequence[Part],
        replicated: ReplicatedGradients,
        groups: UpdateGroups,
        routers: Routers,
        logits: AttentionLogits,
        *,
        at_once: bool,
        count_zeros: bool,
    ) -> None:
        self.inverse_scale: torch.Tensor | None = None
        """1 / loss scale of the captured batch; None without loss scaling."""
        self.num_tokens: torch.Tensor | None = None
        """Tokens of the captured batch on this rank, to divide by; None for a mean per microbatch."""
        self._captured = captured
        self._sources = tuple(sources)
        self._parts = [_merged(parts)] if at_once else parts
        self._groups = groups
        self._routers = routers
        self._logits = logits
        self._count_zeros = count_zeros
        average = model.ddp_config.average_in_collective
        self._operation = dist.ReduceOp.AVG if average else dist.ReduceOp.SUM
        self._scatters_to_fp32 = model.ddp_config.reduce_scatter_with_fp32_accumulation
        self._replicated = replicated
        self._tied = _tied_gradient(model, captured) if groups.embedding is not None else None
        self.links: dict[Reduction, Callable[[], object]] = {
            Reduction.GRADIENTS: self.sum_over_peers,
            Reduction.EMBEDDING: self.sum_tied_embedding,
            Reduction.NORM: self.statistics,
        }

    def warm_up(self, *, scaled: bool, per_token: bool) -> None:
        """Find the statistics of gradients that are zero, and stay so, together with all other ranks.

        On a GPU, kernels are loaded when they are first used, and that waits for all that runs there: in the thread
        that runs `statistics`, for whatever receives are posted by then. Before the first batch there are none.

        Args:
            scaled: whether there will be a loss scale.
            per_token: whether there will be a number of tokens.
        """
        device = self._captured.device
        self.inverse_scale = torch.ones(1, device=device) if scaled else None
        self.num_tokens = torch.ones([], dtype=torch.int, device=device) if per_token else None
        self.statistics()
        self.inverse_scale = self.num_tokens = None

    def sum_over_peers(self) -> None:
        """Mean over data-parallel replicas, as DDP scales it; then what tensor-parallel ranks replicate.

        Last, what moves the biases of experts, and what clips attention.
        """
        with needs_peers("the sum of gradients over replicas"):
            for source, kept in zip(self._sources, self._captured.kept, strict=True):
                self._sum_over_replicas(source, kept)
        self._captured.capture_shards()
        for operation, gradients in self._replicated.items():
            flat = _flatten_dense_tensors(gradients)
            with needs_peers("the sum of gradients over tensor-parallel ranks"):
                dist.all_reduce(flat, op=operation, group=self._groups.tensor)
            for gradient, reduced in zip(gradients, _unflatten_dense_tensors(flat, gradients), strict=True):
                gradient.copy_(reduced)
        if self._groups.stage is not None:
            with needs_peers("the sum of tokens per expert"):
                self._routers.reduce(self._groups.stage)
        for replicas in self._logits.groups:
            with needs_peers("the largest attention logits of the replicas"):
                self._logits.reduce(self._groups.peers(replicas))

    def sum_tied_embedding(self) -> None:
        """Sum of the tied weight's gradients on the first and the last stage."""
        if self._tied is not None:
            with needs_peers("the sum of the tied embedding's gradients"):
                dist.all_reduce(self._tied, group=self._groups.embedding)

    def statistics(self) -> Statistics:
        """Gradients as the optimizer wants them, but for clipping, and what clipping needs to know."""
        if self.num_tokens is not None:
            self._divide_by_tokens(self.num_tokens)
        squares, zeros, found_inf = [], 0, False
        for part in self._parts:
            overflow = self._unscale(part.gradients)
            summed = torch.stack([*map(_squared_norm, part.for_norms), overflow])
            group = self._groups.statistics(part.group)
            with needs_peers("the global gradient norm"):
                dist.all_reduce(summed, group=group)
            *of_part, overflows = summed.tolist()
            squares.append(of_part)
            found_inf |= overflows > 0
            if self._count_zeros:
                count = _zeros_among(list(chain.from_iterable(part.for_norms)))
                with needs_peers("the number of zeros among the gradients"):
                    dist.all_reduce(count, group=group)
                zeros += int(count)
        norms = tuple(map(_norm_of_parts, zip(*squares, strict=True)))
        return Statistics(norms, found_inf, zeros if self._count_zeros else None)

    def _sum_over_replicas(self, source: Source, kept: torch.Tensor) -> None:
        (whole, part), scaling, is_sharded = source.region, source.scaling, source.region.is_sharded
        peers = self._groups.peers(source.group)
        target, summed = (whole, part) if is_sharded else (kept, kept)
        if scaling != 1.0:
            target *= scaling
        if is_sharded and self._scatters_to_fp32:
            reduce_scatter_with_fp32_accumulation(part, whole, op=self._operation, group=peers, async_op=False)
        elif is_sharded:
            dist.reduce_scatter_tensor(part, whole, op=self._operation, group=peers)
        elif peers is not None:
            dist.all_reduce(target, op=self._operation, group=peers)
        if source.instances is not None:
            dist.all_reduce(summed, op=self._operation, group=self._groups.peers(source.instances))

    def _divide_by_tokens(self, num_tokens: torch.Tensor) -> None:
        """Only the last stage counts tokens; the mean is over those of all replicas."""
        total = num_tokens.cpu()
        with needs_peers("the number of tokens"):
            dist.all_reduce(total, group=self._groups.pipeline)
            dist.all_reduce(total, group=self._groups.data)
        scaling = 1.0 / torch.clamp(total, min=1)
        for kept in self._captured.kept:
            kept *= scaling.to(kept.device)

    def _unscale(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        """Remove the loss scale; returns 1.0 on the host if that found an overflow, else 0.0."""
        if self.inverse_scale is None or not gradients:
            return torch.zeros([])
        found = torch.zeros(1, device=self._captured.device)
        torch._amp_foreach_non_finite_check_and_unscale_(gradients, found, self.inverse_scale)
        return found[0].cpu()


def _merged(parts: Sequence[Part]) -> Part:
    gradients = [gradient for part in parts for gradient in part.gradients]
    for_norms = [list(chain.from_iterable(lists)) for lists in zip(*(part.for_norms for part in parts), strict=True)]
    return Part(gradients, for_norms, parts[0].group)


def _norm_of_parts(squares: Sequence[float]) -> float:
    norms = [square**0.5 for square in squares]
    return norms[0] if len(norms) == 1 else math.sqrt(sum(norm**2 for norm in norms))


def _squared_norm(gradients: list[torch.Tensor]) -> torch.Tensor:
    """On the host, float32, no dimensions; Megatron, too, copies gradients in bf16 to fp32 first."""
    if not gradients:
        return torch.zeros([])
    overflow = torch.zeros(1, dtype=torch.int, device=gradients[0].device)
    in_fp32 = [gradient.float() for gradient in gradients]
    norm, _ = clip_grads.multi_tensor_applier(clip_grads.l2_norm_impl, overflow, [in_fp32], False)
    return (norm**2.0).reshape([]).cpu()


def _zeros_among(gradients: list[torch.Tensor]) -> torch.Tensor:
    """Their number, on the host, int64, no dimensions."""
    elements = torch.tensor(sum(gradient.numel() for gradient in gradients))
    nonzero = [torch.count_nonzero(gradient) for gradient in gradients]
    return elements - torch.stack(nonzero).sum().cpu() if nonzero else elements


def replicated_gradients(model: torch.nn.Module, captured: CapturedGradients) -> ReplicatedGradients:
    """Gradients of weights that all tensor-parallel ranks hold whole, each with its part of the sum, by how to combine.

    The rule is that of Megatron's ``_allreduce_non_tensor_model_parallel_grads``.
    """
    if parallel_state.get_tensor_model_parallel_group().size() == 1:
        return {}
    config = get_model_config(model)
    operations: ReplicatedGradients = {dist.ReduceOp.SUM: [], dist.ReduceOp.AVG: []}
    for name, parameter in _trained(model):
        is_query_or_key = config.qk_layernorm and ("q_layernorm" in name or "k_layernorm" in name)
        gradient = captured.within(parameter.main_grad)
        if gradient is None:
            continue
        if getattr(parameter, "average_gradients_across_tp_domain", False):
            operations[dist.ReduceOp.AVG].append(gradient)
        elif is_query_or_key or (config.sequence_parallel and getattr(parameter, "sequence_parallel", False)):
            operations[dist.ReduceOp.SUM].append(gradient)
    return {operation: gradients for operation, gradients in operations.items() if gradients}


def _trained(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    named: Callable[[], Iterator[tuple[str, Any]]] = get_attr_wrapped_model(model, "named_parameters")
    return ((name, parameter) for name, parameter in named() if parameter.requires_grad)


def _tied_gradient(model: torch.nn.Module, captured: CapturedGradients) -> torch.Tensor | None:
    """With the distributed optimizer its bucket is cut in the same way on both stages."""
    gpt = get_attr_wrapped_model(model, "pre_process", return_model_obj=True)
    gradient = getattr(gpt.shared_embedding_or_output_weight(), "main_grad", None)  # None where it is frozen.
    return None if gradient is None else captured.within(gradient)
