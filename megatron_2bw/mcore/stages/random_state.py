"""The random state of a rank, taken at one time and saved at another."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from megatron.core import tensor_parallel


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomState:
    """Everything that Megatron's ``get_rng_state`` reads."""

    python: Any
    numpy: Any
    cpu: torch.Tensor
    cuda: torch.Tensor
    tracker: dict[str, Any]
    """Of Megatron's tracker, by name: a state, or a generator where the tracker keeps generators."""

    @classmethod
    def present(cls) -> RandomState:
        """The state now; what is drawn later does not change it."""
        tracker = tensor_parallel.get_cuda_rng_tracker().get_states()
        return cls(
            python=random.getstate(),
            numpy=np.random.get_state(),
            cpu=torch.get_rng_state(),
            cuda=torch.cuda.get_rng_state(),
            tracker={
                name: state.clone_state() if isinstance(state, torch.Generator) else state
                for name, state in tracker.items()
            },
        )

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Inside, all generators have this state; afterwards, the one they had before."""
        tracker = tensor_parallel.get_cuda_rng_tracker()
        before, states = RandomState.present(), tracker.get_states()
        self._set(self.tracker)
        try:
            yield
        finally:
            before._set(states)

    def _set(self, tracker_states: dict[str, Any]) -> None:
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        torch.set_rng_state(self.cpu)
        torch.cuda.set_rng_state(self.cuda)
        tensor_parallel.get_cuda_rng_tracker().set_states(tracker_states)
