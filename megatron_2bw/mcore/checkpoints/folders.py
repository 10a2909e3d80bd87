"""Folders of checkpoints: one that is there is never half of another one.

Megatron writes over a checkpoint of the same iteration, and removes a non-persistent one before the next is complete.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.training import checkpointing, get_args, wandb_utils
from megatron.training.async_utils import maybe_finalize_async_save

from megatron_2bw.mcore import symbols


def save(original: Callable[..., Any], iteration: int, *rest: Any, **keywords: Any) -> Any:
    """Save as Megatron does; a checkpoint that is there already stays until the new one is complete."""
    non_persistent = keywords.get("non_persistent_ckpt", False)
    present = Path(checkpointing.get_checkpoint_name(_folder(non_persistent), iteration, return_base_dir=True))
    if non_persistent:
        maybe_finalize_async_save(blocking=True)
    if dist.get_rank() == 0:
        finish_replacements(present.parent, saves_there=True)  # While the tracker file says what is complete.
        if non_persistent:
            remove_all_but_the_named(present.parent)
    if not _of_rank_0(present.exists()):
        return original(iteration, *rest, **keywords)
    maybe_finalize_async_save(blocking=True)  # It may be of this very iteration.
    overwrites_the_named = _of_rank_0(named_in(present.parent) == iteration)
    beside, old = (present.with_name(f"{what}_{present.name}") for what in ("unfinished", "replaced"))
    if dist.get_rank() == 0:
        remove(beside)
        if not overwrites_the_named:
            # Megatron's tracker file will name this iteration as soon as all is written, and not the old one then.
            if old.exists():  # A kill stopped a save over this one, with --ckpt-step: what it wrote may be a half.
                remove(present)
            else:
                present.rename(old)
    dist.barrier()
    with _writing_to(beside, instead_of=present) if overwrites_the_named else contextlib.nullcontext():
        result = original(iteration, *rest, **keywords)
        maybe_finalize_async_save(blocking=True)
    if dist.get_rank() == 0:
        if overwrites_the_named:
            replace(present, beside)
        else:
            remove(old)
    dist.barrier()
    return result


def load(original: Callable[..., Any], *rest: Any, **keywords: Any) -> Any:
    """Load as Megatron does, all of the same iteration, or fail where it would end as if nothing were wrong.

    Raises:
        RuntimeError: it cannot read the checkpoint.
    """
    args = get_args()
    folders = [folder for folder in (args.load, args.pretrained_checkpoint) if folder is not None]
    is_alone = not dist.is_initialized()
    if is_alone or dist.get_rank() == 0:
        for folder in (*folders, _non_persistent(args, args.load)):
            if folder is not None:
                finish_replacements(Path(folder), saves_there=_saves_to(args, folder))
    if not is_alone:
        dist.barrier()
    trackers = [checkpointing.get_checkpoint_tracker_filename(folder) for folder in folders]
    why = f"Megatron could not go on from the checkpoint in {' or '.join(folders)}; it says why above"
    with _failing(args, trackers, why), _reading_step(args.ckpt_step, trackers):
        return original(*rest, **keywords)


def read(original: Callable[..., Any], folder: str, args: Any, *rest: Any, **keywords: Any) -> Any:
    """Read the files as Megatron does, or fail where it would end as if nothing were wrong.

    Raises:
        RuntimeError: they are damaged.
    """
    if not dist.is_initialized():  # For --use-checkpoint-args, on all ranks, before `load`.
        finish_renames(Path(folder))
    why = f"the checkpoint in {folder} is damaged: Megatron cannot read it; load another one by --ckpt-step"
    trackers = [checkpointing.get_checkpoint_tracker_filename(folder)]
    with _failing(args, trackers, why), _reading_step(args.ckpt_step, trackers):
        return original(folder, args, *rest, **keywords)


def replace(present: Path, new: Path) -> None:
    """Put the checkpoint ``new`` in the place of ``present``.

    Half overwritten, a checkpoint would load as a mixture of two runs; without one, the tracker file
    would name nothing. A process that is killed between the two renames leaves both checkpoints
    complete, and a name that does not exist: `finish_replacements` does the rest.
    """
    old = present.with_name(f"replaced_{present.name}")
    remove(old)
    if present.exists():
        present.rename(old)
    try:
        new.rename(present)
    except FileNotFoundError:  # A job that reads from here may have taken this one for dead, and done so.
        if not present.exists():
            raise
    remove(old)


def finish_replacements(folder: Path, *, saves_there: bool) -> None:
    """Complete or take back every save in ``folder`` that a kill stopped while it overwrote a checkpoint.

    Args:
        folder: of checkpoints; where nothing can be changed in it, nothing is.
        saves_there: whether this job is the one that saves to it. Another one may be saving right now.
    """
    finish_renames(folder)
    named = named_in(folder)
    with _unless_read_only():
        for old in folder.glob("replaced_iter_*"):
            present = old.with_name(old.name.removeprefix("replaced_"))
            iteration = int(present.name.removeprefix("iter_"))
            if named == iteration and present.exists():
                remove(old)
            elif saves_there and named is not None and named < iteration:  # What took its place is half written.
                remove(present)
                old.rename(present)
        for unfinished in folder.glob("unfinished_iter_*") if saves_there else ():
            if unfinished.with_name(unfinished.name.removeprefix("unfinished_")).exists():
                remove(unfinished)


def finish_renames(folder: Path) -> None:
    """The part of `finish_replacements` without which a checkpoint is missing; ranks may do so at the same time."""
    named = _name(named_in(folder))
    for new in folder.glob("unfinished_iter_*"):
        present = new.with_name(new.name.removeprefix("unfinished_"))
        if not present.exists() and present.name == named:
            with contextlib.suppress(FileNotFoundError), _unless_read_only():  # Another rank was first.
                new.rename(present)


@contextlib.contextmanager
def _unless_read_only() -> Iterator[None]:
    """Leave a folder as it is that others alone may change; a checkpoint that is missing for that says so itself."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.EROFS, errno.EACCES, errno.EPERM):
            raise


def named_in(folder: Path) -> int | None:
    """The iteration that Megatron's tracker file names, whose checkpoint is complete; -1 for none, None for others."""
    tracker = Path(checkpointing.get_checkpoint_tracker_filename(str(folder)))
    try:
        return int(tracker.read_text())
    except FileNotFoundError:
        return -1
    except (OSError, ValueError):  # It names a release, or is damaged.
        return None


def _name(iteration: int | None) -> str:
    return "" if iteration is None else f"iter_{iteration:07d}"


def _of_rank_0(found: bool) -> bool:
    """The same on all ranks, whatever their file systems say."""
    known = [found]
    dist.broadcast_object_list(known, src=0)
    return known[0]


def _saves_to(args: Any, folder: str) -> bool:
    """Whether this job is the one that saves to ``folder``."""
    own = [args.save, _non_persistent(args, args.save)]
    return not args.skip_train and os.path.realpath(folder) in [os.path.realpath(one) for one in own if one]


def remove_all_but_the_named(folder: Path) -> None:
    """Remove non-persistent checkpoints that Megatron's tracker file does not name: they are half written.

    Megatron keeps the one of the highest number, and would remove the named one for the sake of it.
    """
    named = _name(named_in(folder))
    for checkpoint in folder.glob("iter_*"):
        if checkpoint.name != named:
            remove(checkpoint)


def remove(checkpoint: Path) -> None:
    """Remove a folder, or the link to one; neither need be there."""
    if checkpoint.is_symlink():
        checkpoint.unlink(missing_ok=True)
    elif checkpoint.exists():
        shutil.rmtree(checkpoint, onexc=_unless_gone)


def _unless_gone(function: Callable[..., Any], path: str, error: BaseException) -> None:
    if not isinstance(error, FileNotFoundError):  # Another job that reads from here removes the same.
        raise error


def _folder(non_persistent: bool) -> str:
    """Where Megatron's ``save_checkpoint`` puts checkpoints."""
    args = get_args()
    return _non_persistent(args, args.save) if non_persistent else args.save


def _non_persistent(args: Any, folder: str | None) -> str | None:
    """Where the non-persistent ones of ``folder`` are, if anywhere."""
    if args.non_persistent_global_ckpt_dir or folder is None:
        return args.non_persistent_global_ckpt_dir
    return os.path.join(folder, checkpointing._NON_PERSISTENT_CKPT_SUBDIR)


@contextlib.contextmanager
def _failing(args: Any, trackers: Sequence[str], why: str) -> Iterator[None]:
    """Fail where Megatron leaves as after a finished run, though there is a checkpoint.

    Without one, that is what ``--exit-on-missing-checkpoint`` asks for.
    """
    try:
        yield
    except SystemExit as exit_:
        if exit_.code or not (getattr(args, "ckpt_step", None) or any(map(os.path.isfile, trackers))):
            raise
        raise RuntimeError(why) from exit_


def _reading_step(step: int | None, trackers: Sequence[str]) -> contextlib.AbstractContextManager[object]:
    """Let ``--ckpt-step`` decide wherever Megatron asks these files for an iteration.

    In the torch format it asks once more, for the distributed optimizer's state, and forgets the step.
    """
    original = checkpointing.read_metadata

    def read(tracker: str) -> tuple[int, bool]:
        return (step, False) if step and tracker in trackers else original(tracker)

    return symbols.replace(checkpointing, "read_metadata", read)


@contextlib.contextmanager
def _writing_to(beside: Path, *, instead_of: Path) -> Iterator[None]:
    """Let Megatron write one checkpoint under another name, which no run loads, and W&B know it by its own."""
    original, report = checkpointing.get_checkpoint_name, wandb_utils.on_save_checkpoint_success

    def moved(path: str, source: Path, target: Path) -> str:
        return str(target / Path(path).relative_to(source) if Path(path).is_relative_to(source) else path)

    def name(*args: Any, **keywords: Any) -> str:
        return moved(original(*args, **keywords), instead_of, beside)

    def reported(path: str, *rest: Any) -> None:
        report(moved(path, beside, instead_of), *rest)

    with (
        symbols.replace(checkpointing, "get_checkpoint_name", name),
        symbols.replace(wandb_utils, "on_save_checkpoint_success", reported),
    ):
        yield
