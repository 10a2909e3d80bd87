"""The run of this process: Megatron calls hooks as bare functions, and they find it here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_2bw.mcore.checkpoints.checkpoint import Checkpoints
    from megatron_2bw.mcore.loop.session import Session


@dataclass(slots=True)
class Active:
    """What hooks hand on to each other."""

    session: Session | None = None
    """From the optimizer on, to the end of training."""
    checkpoints: Checkpoints | None = None
    """Of the newest delayed run; saves may come after it has ended."""
    mirrored: Any = None
    """The second stage of a run that is being set up."""
    loads_updates: bool = True
    """Whether there were any before the checkpoint that is being loaded."""

    _watch: Callable[[], None] | None = None
    """Ends what ends the process on an error after training."""

    def begin(self, session: Session, checkpoints: Checkpoints | None) -> None:
        """A run is set up; it has its mirrored stage."""
        self.session, self.checkpoints, self.mirrored = session, checkpoints, None

    def end(self) -> None:
        """Of training, planned or not; Megatron still evaluates and saves, and an error then ends the process, too."""
        from megatron_2bw.mcore.failure import end_at_once_on_errors

        self.session.close()
        self.session = None
        self._watch = end_at_once_on_errors(lambda: "after training")

    def forget(self) -> None:
        """Give back what the run has taken, if there is one; waits for nobody."""
        if self._watch is not None:
            self._watch()
            self._watch = None
        session = self.session
        self.session = self.checkpoints = self.mirrored = None
        if session is not None:
            session.forget()


active = Active()
