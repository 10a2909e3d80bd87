"""Several versions of a stage's weights behind one set of Parameters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch


class WeightVersions:
    """The newest ``slots`` versions of some parameters; version v lives in slot ``v % slots``.

    Parameters keep their identity, hooks and gradient accumulators; only where their data points
    changes. ``use`` must be called before every forward *and* backward: autograd mixes saved views
    of the old data with reads of ``param.data``, silently, if the two differ.

    Args:
        parameters: trained parameters, and whatever else an update changes; their present data become version 0.
        slots: versions alive at once, 2 for 2BW, d-s for PipeDream. Extra memory: ``slots - 1`` copies.
        buffers: flat tensors that hold the data of parameters, as the distributed optimizer has
            them. Each is copied as a whole, so that parts that other ranks fill in are kept too.
        views: further tensors that follow the parameters, views of the same data.

    >>> weight = torch.nn.Parameter(torch.zeros(2))
    >>> versions = WeightVersions([weight])
    >>> with versions.update():
    ...     weight.data += 1
    >>> versions.use(0); weight.tolist()
    [0.0, 0.0]
    >>> versions.use(1); weight.tolist()
    [1.0, 1.0]
    """

    def __init__(
        self,
        parameters: Iterable[torch.Tensor],
        slots: int = 2,
        *,
        buffers: Sequence[torch.Tensor] = (),
        views: Iterable[torch.Tensor] = (),
    ) -> None:
        self._parameters = tuple(parameters)
        self._followers = (*self._parameters, *buffers, *views)
        first = _Slot([tensor.data for tensor in self._followers], [buffer.data for buffer in buffers])
        self._slots = [first, *(first.copy() for _ in range(slots - 1))]
        self.active = 0
        """The version that the parameters show."""
        self.newest = 0
        """Number of updates so far: the newest version is ``W(newest)``."""
        self.first = 0
        """The oldest version in use: a batch that would compute with an older one computes with this one."""

    @property
    def slots(self) -> int:
        """Versions alive at once, at most."""
        return len(self._slots)

    @property
    def alive(self) -> int:
        """Versions that are alive now."""
        return min(self.newest + 1 - self.first, self.slots)

    def use(self, version: int) -> None:
        """Point the parameters at ``W(max(version, first))``.

        Raises:
            RuntimeError: that version is overwritten already, or not made yet.
        """
        version = max(version, self.first)
        if not self.newest - len(self._slots) < version <= self.newest:
            raise RuntimeError(f"W({version}) is not alive; the newest of {len(self._slots)} is W({self.newest})")
        self._point_at(version)

    def use_newest(self) -> None:
        """Point the parameters at the newest version, for evaluation and checkpoints."""
        self._point_at(self.newest)

    def forget_older(self) -> None:
        """Let the delay begin anew at the newest version."""
        self.first = self.newest

    @contextmanager
    def update(self) -> Iterator[None]:
        """Inside, the parameters hold a copy of the newest version, to be changed into the next one.

        The copy overwrites the oldest version, which must have no reader left. Left unchanged, as
        by a skipped update, it makes ``W(t+1) = W(t)``.
        """
        newest = self._slots[self.newest % len(self._slots)]
        following = self._slots[(self.newest + 1) % len(self._slots)]
        if newest.storages:
            torch._foreach_copy_(following.storages, newest.storages)
        self._point_at(self.newest + 1)
        # Graphs of batches in flight saved these Parameters; an in-place step on the new data must
        # not look to autograd like a change of the old.
        with torch.autograd._unsafe_preserve_version_counter(self._parameters):
            yield
        self.newest += 1

    def _point_at(self, version: int) -> None:
        if version == self.active:
            return
        for tensor, data in zip(self._followers, self._slots[version % len(self._slots)].data, strict=True):
            tensor.data = data
        self.active = version


class _Slot:
    """Where the data of one version are.

    Args:
        data: of every tensor that follows the versions.
        buffers: flat tensors that some of ``data`` are views of.
    """

    def __init__(self, data: Sequence[torch.Tensor], buffers: Sequence[torch.Tensor]) -> None:
        self.data = tuple(data)
        self._buffers = tuple(buffers)
        shared = {buffer.untyped_storage().data_ptr() for buffer in buffers}
        own = (tensor for tensor in data if tensor.untyped_storage().data_ptr() not in shared)
        self.storages = [*buffers, *own]
        """Tensors that together cover all data, each once."""

    def copy(self) -> _Slot:
        """Room for another version, laid out in the same way; its values are undefined."""
        buffers = [torch.empty_like(buffer) for buffer in self._buffers]
        copies = {a.untyped_storage().data_ptr(): (a, b) for a, b in zip(self._buffers, buffers, strict=True)}

        def counterpart(tensor: torch.Tensor) -> torch.Tensor:
            pair = copies.get(tensor.untyped_storage().data_ptr())
            if pair is None:
                return torch.empty_like(tensor)
            offset = tensor.storage_offset() - pair[0].storage_offset()
            return pair[1].as_strided(tensor.size(), tensor.stride(), pair[1].storage_offset() + offset)

        return _Slot([counterpart(tensor) for tensor in self.data], buffers)
