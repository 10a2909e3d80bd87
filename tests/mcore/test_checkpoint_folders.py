"""Folders of checkpoints, and what is read from where; without a run."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest


def _checkpoint(folder: Path, text: str) -> Path:
    folder.mkdir(parents=True)
    (folder / "file").write_text(text)
    return folder


@pytest.fixture
def saving(tmp_path, monkeypatch):
    from megatron_2bw.mcore.checkpoints import folders

    monkeypatch.setattr(folders, "dist", MagicMock(get_rank=lambda: 0))
    monkeypatch.setattr(folders, "maybe_finalize_async_save", lambda **_: None)
    args = SimpleNamespace(
        save=str(tmp_path),
        load=str(tmp_path),
        skip_train=False,
        pretrained_checkpoint=None,
        ckpt_step=None,
        non_persistent_global_ckpt_dir=None,
    )
    monkeypatch.setattr(folders, "get_args", lambda: args)
    monkeypatch.setattr(folders.checkpointing, "get_args", lambda: args)
    return folders, args


def test_the_only_checkpoint_left_is_not_removed(tmp_path: Path) -> None:
    from megatron_2bw.mcore.checkpoints.folders import finish_replacements

    old = _checkpoint(tmp_path / "replaced_iter_0000006", "old, its successor was removed by hand")
    finish_replacements(tmp_path, saves_there=False)
    assert (old / "file").exists()
    finish_replacements(tmp_path, saves_there=True)
    assert (tmp_path / "iter_0000006" / "file").exists()


def test_a_replacement_is_finished_before_arguments_are_read(saving, tmp_path) -> None:
    """``--use-checkpoint-args`` reads before there are process groups, on every rank."""
    folders, args = saving
    folders.dist.is_initialized = lambda: False
    _checkpoint(tmp_path / "replaced_iter_0000006", "old")
    _checkpoint(tmp_path / "unfinished_iter_0000006", "new")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("6")
    present = tmp_path / "iter_0000006" / "file"
    for _ in range(2):
        assert folders.read(lambda folder, args: present.read_text(), str(tmp_path), args) == "new"


@pytest.mark.parametrize("killed", [False, True])
def test_another_job_may_finish_a_replacement_and_remove_what_was_there(tmp_path, monkeypatch, killed: bool) -> None:
    """One that loads from the same folder between the two renames of a save, which may be killed there, too."""
    from megatron_2bw.mcore.checkpoints import folders

    (tmp_path / "latest_checkpointed_iteration.txt").write_text("6")
    present = _checkpoint(tmp_path / "iter_0000006", "old")
    new = _checkpoint(tmp_path / "unfinished_iter_0000006", "new")
    rename = Path.rename

    def after_another(path: Path, target: Path) -> Path:
        if path == new:
            monkeypatch.undo()
            folders.finish_replacements(tmp_path, saves_there=False)
            if killed:
                raise KeyboardInterrupt
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", after_another)
    with pytest.raises(KeyboardInterrupt) if killed else contextlib.nullcontext():
        folders.replace(present, new)
    if killed:
        folders.finish_replacements(tmp_path, saves_there=True)
    assert [path.name for path in tmp_path.glob("*iter_*")] == ["iter_0000006"]
    assert (present / "file").read_text() == "new"


def test_what_another_one_removes_first_is_removed(tmp_path, monkeypatch) -> None:
    from megatron_2bw.mcore.checkpoints import folders

    checkpoint = _checkpoint(tmp_path / "replaced_iter_0000006", "old")
    unlink = os.unlink

    def after_another(path: str, **keywords: Any) -> None:
        unlink(path, **keywords)
        unlink(path, **keywords)

    monkeypatch.setattr(os, "unlink", after_another)
    folders.remove(checkpoint)
    assert not checkpoint.exists()


def test_nothing_of_a_killed_save_is_in_the_next_one(saving, tmp_path) -> None:
    folders, _ = saving
    present = _checkpoint(tmp_path / "iter_0000006", "old")
    (_checkpoint(tmp_path / "unfinished_iter_0000006", "half") / "of another layout").touch()

    def write(iteration):
        name = folders.checkpointing.get_checkpoint_name(str(tmp_path), iteration, return_base_dir=True)
        Path(name).mkdir(exist_ok=True)
        (Path(name) / "file").write_text("new")

    folders.save(write, 6)
    assert [path.name for path in present.iterdir()] == ["file"]
    assert (present / "file").read_text() == "new"


def test_an_exit_for_want_of_a_checkpoint_is_megatrons(saving) -> None:
    """``--exit-on-missing-checkpoint``."""
    folders, _ = saving
    with pytest.raises(SystemExit):
        folders.load(lambda: sys.exit(0))


def test_a_non_persistent_replacement_is_finished_before_loading(saving, tmp_path) -> None:
    folders, _ = saving
    there = tmp_path / "non_persistent"
    _checkpoint(there / "replaced_iter_0000006", "old")
    _checkpoint(there / "unfinished_iter_0000006", "new")
    (there / "latest_checkpointed_iteration.txt").write_text("6")
    folders.load(lambda: None)
    assert (there / "iter_0000006" / "file").read_text() == "new"


def test_a_chosen_step_is_not_that_of_other_folders(saving, tmp_path) -> None:
    folders, args = saving
    args.ckpt_step = 4
    there = tmp_path / "non_persistent"
    there.mkdir()
    (there / "latest_checkpointed_iteration.txt").write_text("9")
    tracker = folders.checkpointing.get_checkpoint_tracker_filename
    read = folders.checkpointing.read_metadata
    found = folders.load(lambda: [folders.checkpointing.read_metadata(tracker(str(f)))[0] for f in (tmp_path, there)])
    assert found == [4, 9]
    assert folders.checkpointing.read_metadata is read


def test_a_damaged_checkpoint_to_finetune_is_an_error(saving, tmp_path) -> None:
    """``--load`` is empty still, and ``--pretrained-checkpoint`` cannot be read."""
    folders, args = saving
    args.pretrained_checkpoint = str(tmp_path / "pretrained")
    (tmp_path / "pretrained").mkdir()
    (tmp_path / "pretrained" / "latest_checkpointed_iteration.txt").write_text("4")
    with pytest.raises(RuntimeError, match="could not go on from the checkpoint"):
        folders.load(lambda: sys.exit(0))


@pytest.mark.parametrize("asked", [{}, {"pipeline_schedule": "megatron"}], ids=["by default", "by name"])
def test_megatrons_own_schedule_loads_as_without_us(saving, asked, tmp_path, monkeypatch) -> None:
    from megatron_2bw.mcore.loop import wrappers

    folders, args = saving
    vars(args).update(asked)
    monkeypatch.setattr("megatron.training.get_args", lambda: args)
    unfinished = _checkpoint(tmp_path / "unfinished_iter_0000006", "new")
    old = _checkpoint(tmp_path / "replaced_iter_0000006", "old")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("6")

    def load(*given: object, strict: bool) -> None:
        assert given == ("model", "optimizer") or given == (str(tmp_path), args)
        assert (unfinished.exists(), old.exists(), strict) == (True, True, True)
        assert folders.checkpointing.read_metadata is reads
        sys.exit()

    reads = folders.checkpointing.read_metadata
    with pytest.raises(SystemExit):
        wrappers.load_checkpoint(load, "model", "optimizer", strict=True)
    with pytest.raises(SystemExit):
        wrappers.read_checkpoint(load, str(tmp_path), args, strict=True)


@pytest.mark.parametrize("killed", ["before it is named", "once it is named", None])
@pytest.mark.parametrize("named", ["5", "6"])
def test_a_kill_while_another_runs_checkpoint_is_overwritten(saving, tmp_path, named, killed) -> None:
    """A run that goes on from step 5 writes over step 6 of the run before, which the tracker file names, or does not.

    Whatever it names afterwards is all of one run; and of this one, once Megatron has named it.
    """
    folders, _ = saving
    tracker, present = tmp_path / "latest_checkpointed_iteration.txt", tmp_path / "iter_0000006"
    tracker.write_text(named)
    _checkpoint(present, "old")
    _checkpoint(tmp_path / "iter_0000005", "old")

    def write(iteration: int) -> None:
        name = Path(folders.checkpointing.get_checkpoint_name(str(tmp_path), iteration, return_base_dir=True))
        name.mkdir(exist_ok=True)
        (name / "file").write_text("half")
        if killed == "before it is named":
            raise KeyboardInterrupt
        (name / "file").write_text("new")
        tracker.write_text(str(iteration))
        if killed:
            raise KeyboardInterrupt

    if killed:
        with pytest.raises(KeyboardInterrupt):
            folders.save(write, 6)
    else:
        folders.save(write, 6)
    folders.load(lambda: None)
    files = {path.parent.name: path.read_text() for path in tmp_path.glob("*/file")}
    is_new = killed is None or (killed == "once it is named" and named == "5")
    assert files == {"iter_0000005": "old", "iter_0000006": "new" if is_new else "old"}
    assert tracker.read_text() == ("6" if killed != "before it is named" else named)


def test_a_complete_checkpoint_of_an_earlier_step_outlives_two_kills(saving, tmp_path) -> None:
    """One goes on by ``--ckpt-step 5``, below the tracker file's 10, and is killed while it writes over 6."""
    folders, _ = saving
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("10")
    _checkpoint(tmp_path / "iter_0000006", "complete")

    def killed(iteration: int) -> None:
        _checkpoint(tmp_path / "iter_0000006", "half")
        raise KeyboardInterrupt

    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            folders.save(killed, 6)
        assert (tmp_path / "replaced_iter_0000006/file").read_text() == "complete"
    folders.save(lambda iteration: _checkpoint(tmp_path / "iter_0000006", "new"), 6)
    assert [path.name for path in tmp_path.glob("*iter_*")] == ["iter_0000006"]


def test_a_folder_that_cannot_be_changed_is_read_as_it_is(saving, tmp_path, monkeypatch) -> None:
    folders, args = saving
    args.save = None
    _checkpoint(tmp_path / "replaced_iter_0000005", "old")
    _checkpoint(tmp_path / "unfinished_iter_0000005", "new")
    _checkpoint(tmp_path / "iter_0000004", "wanted")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("4")

    def read_only(*_: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Path, "rename", read_only)
    folders.load(lambda: None)
    assert (tmp_path / "iter_0000004" / "file").read_text() == "wanted"


def test_a_chosen_step_is_read_where_the_tracker_file_is_damaged(saving, tmp_path) -> None:
    """``--use-checkpoint-args --ckpt-step 4``: the message about a damaged one says to give a step."""
    folders, args = saving
    args.ckpt_step = 4
    folders.dist.is_initialized = lambda: False
    tracker = tmp_path / "latest_checkpointed_iteration.txt"
    tracker.touch()
    read = lambda folder, args: folders.checkpointing.read_metadata(str(tracker))  # noqa: E731
    assert folders.read(read, str(tmp_path), args) == (4, False)


def test_a_save_that_becomes_complete_only_now_is_the_named_one(saving, tmp_path, monkeypatch) -> None:
    """``--async-save``, and the same iteration once more: as where the batch size changes at one that is saved."""
    folders, _ = saving
    tracker = tmp_path / "latest_checkpointed_iteration.txt"
    tracker.write_text("5")
    _checkpoint(tmp_path / "iter_0000006", "all but named")
    monkeypatch.setattr(folders, "maybe_finalize_async_save", lambda **_: tracker.write_text("6"))

    def write(iteration: int) -> None:
        name = Path(folders.checkpointing.get_checkpoint_name(str(tmp_path), iteration, return_base_dir=True))
        name.mkdir(exist_ok=True)
        (name / "file").write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        folders.save(write, 6)
    folders.load(lambda: None)
    assert {path.parent.name: path.read_text() for path in tmp_path.glob("*/file")} == {"iter_0000006": "all but named"}


@pytest.mark.parametrize("skip_train", [True, False])
def test_a_job_that_does_not_train_leaves_what_is_being_saved(saving, tmp_path, skip_train: bool) -> None:
    """It may have the flags of the one that does."""
    folders, args = saving
    args.skip_train, args.load = skip_train, f"{tmp_path}/"
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("6")
    _checkpoint(tmp_path / "iter_0000006", "present")
    _checkpoint(tmp_path / "unfinished_iter_0000006", "being written")
    folders.load(lambda: None)
    assert (tmp_path / "unfinished_iter_0000006").exists() is skip_train
