"""The two stages of a rank in a bidirectional pipeline, behind the executor's interface."""

from __future__ import annotations

import torch
from megatron.core import parallel_state
from torch.utils import _pytree

from megatron_2bw.mcore.stages.mirror import MicrobatchData, Mirror, at_stage
from megatron_2bw.mcore.stages.stage import Call, FlushedStage
from megatron_2bw.schedule.action import Action


class MirroredStage(FlushedStage):
    """Two stages of a bidirectional pipeline: Megatron's own, and one that lends its computation to another rank.

    Args:
        call: the first one's arguments.
        schedule: its name, for messages.
        mirror: the second one.
    """

    def __init__(self, call: Call, schedule: str, mirror: Mirror) -> None:
        super().__init__(call, schedule)
        self._own = parallel_state.get_pipeline_model_parallel_rank()
        self._mirror = mirror

    def begin(self, call: Call) -> None:
        super().begin(call)
        self._mirror.begin()
        self._reports: dict[int, dict[str, torch.Tensor]] = {}
        self._data = None
        if call.data_iterator is not None:
            self._data = MicrobatchData(call.data_iterator, call.num_microbatches)

    def end(self) -> None:
        super().end()
        self._data = None

    def forward(self, action: Action, received: torch.Tensor | None) -> torch.Tensor:
        model = self.call.model if action.stage == self._own else self._mirror.model
        data = None if self._data is None else self._data.at(action.microbatch)
        with at_stage(action.stage):
            output = self._forward(action, received, model, data)
        if action.stage == self._last:
            self._reports[action.microbatch] = self.losses.pop()
        return output

    def backward(
        self, action: Action, received: torch.Tensor | None, output: torch.Tensor, grad: torch.Tensor | None
    ) -> torch.Tensor | None:
        with at_stage(action.stage):
            return super().backward(action, received, output, grad)

    def _reduces_in(self, action: Action) -> bool:
        """In none: those of the stage's other copy are added first."""
        return False

    def update(self, action: Action) -> None:
        """Once for both stages, which end together."""
        if action.stage != self._own:
            return
        self._mirror.start_gradients()
        if self._own in (0, self._last):
            self._join_reports()
        self._mirror.add_gradients()
        if self._data is not None:
            self._data.end()
        super().update(action)

    def _first_of(self, stage: int) -> int:
        return 0 if stage == self._own else 1

    def _join_reports(self) -> None:
        """The last stage gets what its copy on the first rank has found; Megatron asks it alone."""
        num_tokens, reports = self._mirror.exchange((self.num_tokens, self._reports))
        if self._own == self._last:
            self.num_tokens += num_tokens.to(self.num_tokens.device)
            self._reports |= _pytree.tree_map_only(
                torch.Tensor, lambda tensor: tensor.to(self.boundary.device), reports
            )
            self.losses = [report for _, report in sorted(self._reports.items())]
