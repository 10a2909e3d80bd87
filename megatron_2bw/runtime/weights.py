"""Several versions of a stage's weights behind one set of Parameters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch


class WeightVersions:
    """The newest ``slots`` versions of some parameters; version v lives in slot ``v % slots``.

    Parameters keep their identity, hooks and gradient accumulators; only where their data points
    changes. ``use`` must be called before every forward *and* backward: autograd mixes saved views
    of the old data with reads of ``param.data``, silently, if the two differ.

    Args:
        parameters: trained parameters; their present data become version 0.
        slots: versions alive at once, 2 for 2BW. Extra memory: ``slots - 1`` copies.

    >>> weight = torch.nn.Parameter(torch.zeros(2))
    >>> versions = WeightVersions([weight])
    >>> with versions.update():
    ...     weight.data += 1
    >>> versions.use(0); weight.tolist()
    [0.0, 0.0]
    >>> versions.use(1); weight.tolist()
    [1.0, 1.0]
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter], slots: int = 2) -> None:
        self._parameters = tuple(parameters)
        first = [parameter.data for parameter in self._parameters]
        self._slots = [first, *([torch.empty_like(data) for data in first] for _ in range(slots - 1))]
        self._active = 0
        self.newest = 0
        """Number of updates so far: the newest version is ``W(newest)``."""

    def use(self, version: int) -> None:
        """Point the parameters at ``W(max(version, 0))``.

        Raises:
            RuntimeError: that version is overwritten already, or not made yet.
        """
        version = max(version, 0)
        if not self.newest - len(self._slots) < version <= self.newest:
            raise RuntimeError(f"W({version}) is not alive; the newest of {len(self._slots)} is W({self.newest})")
        self._point_at(version)

    def use_newest(self) -> None:
        """Point the parameters at the newest version, for evaluation and checkpoints."""
        self._point_at(self.newest)

    @contextmanager
    def update(self) -> Iterator[None]:
        """Inside, the parameters hold a copy of the newest version, to be changed into the next one.

        The copy overwrites the oldest version, which must have no reader left. Left unchanged, as
        by a skipped update, it makes ``W(t+1) = W(t)``.
        """
        newest = self._slots[self.newest % len(self._slots)]
        following = self._slots[(self.newest + 1) % len(self._slots)]
        if self._parameters:
            torch._foreach_copy_(following, newest)
        self._point_at(self.newest + 1)
        # Graphs of batches in flight saved these Parameters; an in-place step on the new data must
        # not look to autograd like a change of the old.
        with torch.autograd._unsafe_preserve_version_counter(self._parameters):
            yield
        self.newest += 1

    def _point_at(self, version: int) -> None:
        if version == self._active:
            return
        for parameter, data in zip(self._parameters, self._slots[version % len(self._slots)], strict=True):
            parameter.data = data
        self._active = version
