"""What a captured batch still needs from other ranks before its update."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from megatron.core.optimizer import clip_grads
from megatron.core.utils import get_attr_wrapped_model

from megatron_2bw.mcore.groups import UpdateGroups
from megatron_2bw.runtime.errors import needs_peers
from megatron_2bw.runtime.gradients import CapturedGradients
from megatron_2bw.schedule.action import Reduction


class GradientReductions:
    """The links of the chain from captured gradients to the global norm, each blocking.

    What Megatron does in ``finalize_model_grads`` and ``get_grad_norm_fp32``, with the same
    arithmetic, on the captured copy and on groups of our own.

    Args:
        model: the stage, wrapped in Megatron's DistributedDataParallel.
        captured: its captured gradients.
        for_norm: captured gradients that count in the global norm, each weight once over all ranks.
        groups: who takes part.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        captured: CapturedGradients,
        for_norm: Sequence[torch.Tensor],
        groups: UpdateGroups,
    ) -> None:
        self._captured = captured
        self._for_norm = list(for_norm)
        self._groups = groups
        self._scaling = [buffer.gradient_scaling_factor for buffer in model.buffers]
        average = model.ddp_config.average_in_collective
        self._operation = dist.ReduceOp.AVG if average else dist.ReduceOp.SUM
        self._tied = self._tied_gradient(model) if groups.embedding is not None else None
        self.links = {
            Reduction.GRADIENTS: self.sum_over_replicas,
            Reduction.EMBEDDING: self.sum_tied_embedding,
            Reduction.NORM: self.global_norm,
        }

    def sum_over_replicas(self) -> None:
        """Mean over data-parallel replicas, as DDP scales it."""
        for buffer, scaling in zip(self._captured.buffers, self._scaling, strict=True):
            if scaling != 1.0:
                buffer *= scaling
            if self._groups.gradients is not None:
                with needs_peers("the sum of gradients over replicas"):
                    dist.all_reduce(buffer, op=self._operation, group=self._groups.gradients)

    def sum_tied_embedding(self) -> None:
        """Sum of the tied weight's gradients on the first and the last stage."""
        if self._tied is not None:
            with needs_peers("the sum of the tied embedding's gradients"):
                dist.all_reduce(self._tied, group=self._groups.embedding)

    def global_norm(self) -> float:
        """L2 norm of the whole model's gradient."""
        squared = torch.zeros(1)
        if self._for_norm:
            overflow = torch.zeros(1, dtype=torch.int, device=self._for_norm[0].device)
            norm, _ = clip_grads.multi_tensor_applier(clip_grads.l2_norm_impl, overflow, [self._for_norm], False)
            squared = (norm**2.0).reshape(1).cpu()
        with needs_peers("the global gradient norm"):
            dist.all_reduce(squared, group=self._groups.scalars)
        return squared.item() ** 0.5

    def _tied_gradient(self, model: torch.nn.Module) -> torch.Tensor:
        gpt = get_attr_wrapped_model(model, "pre_process", return_model_obj=True)
        return self._captured.view_of(gpt.shared_embedding_or_output_weight())
