"""Checkpoints of a 2BW run: the newest weights, in a form that Megatron without us opens and continues."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch

from megatron_2bw.mcore.symbols import megatron_version

from .case import EVALUATION_ITERATIONS, Case, Fault
from .compare import differing
from .harness import Results, run
from .oracle import oracle
from .saved import FORMATS

CASE = Case(schedule="2bw", stages=2, microbatches=2, tied=False, batches=18)
INTERVAL = 6


@dataclass(frozen=True)
class Saved:
    """A finished 2BW run with checkpoints every ``INTERVAL`` batches."""

    results: Results
    folder: Path
    format: str

    def opened(self, iteration: int) -> tuple[str, ...]:
        """Flags that continue from ``iteration``."""
        return ("--load", str(self.folder), "--ckpt-step", str(iteration), "--ckpt-format", self.format)


@pytest.fixture(scope="module", params=FORMATS)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    folder = tmp_path_factory.mktemp(request.param)
    return Saved(run(_saving(CASE, folder, request.param)), folder, request.param)


def _saving(case: Case, folder: Path, format_: str) -> Case:
    return replace(case, flags=("--save", str(folder), "--save-interval", str(INTERVAL), "--ckpt-format", format_))


def test_saving_changes_no_number_of_the_training(saved: Saved) -> None:
    assert differing(saved.results, run(CASE)) == []


@pytest.mark.parametrize("iteration", [INTERVAL, CASE.batches])
def test_checkpoint_holds_the_newest_weights(saved: Saved, iteration: int) -> None:
    """Megatron without the extension opens it; validation loss and weights are the oracle's at W(t+1)."""
    evaluating = ("--skip-train", "--eval-iters", str(EVALUATION_ITERATIONS), "--no-load-optim", "--no-load-rng")
    opened = run(replace(CASE, schedule=None, flags=(*saved.opened(iteration), *evaluating)))
    expected = oracle(replace(CASE, batches=iteration), delay=1, evaluate_every=iteration)
    assert torch.equal(opened.validation_losses, expected.validation_losses)
    assert all(torch.equal(opened.final[name], expected.final[name]) for name in expected.final)


def test_checkpoint_holds_the_optimizers_state(saved: Saved) -> None:
    """Megatron without the extension continues from it with ordinary training."""
    continued = run(replace(CASE, schedule=None, flags=saved.opened(INTERVAL)))
    expected = oracle(CASE, delay=1, delayed_batches=INTERVAL)
    assert torch.equal(continued.losses, expected.losses[:, INTERVAL:])
    assert continued.rates == expected.rates[INTERVAL:]
    assert all(torch.equal(continued.final[name], expected.final[name]) for name in expected.final)


def test_an_exit_at_an_interval_finishes_the_last_update(tmp_path: Path) -> None:
    stopped = _saving(CASE, tmp_path, "torch")
    found = run(replace(stopped, flags=(*stopped.flags, "--exit-interval", "9")))
    assert differing(found, oracle(replace(CASE, batches=9), delay=1), norms=False) == []


@pytest.mark.parametrize("saving", [True, False])
def test_an_exit_by_signal_finishes_the_last_update(saving: bool, tmp_path: Path) -> None:
    """Nobody knew that this call would be the last: forwards of the next batch are dropped."""
    stopped = _saving(CASE, tmp_path, "torch") if saving else CASE
    signal = Fault(kind="signal before forward", rank=0, call=7)
    found = run(replace(stopped, flags=(*stopped.flags, "--exit-signal-handler"), faults=(signal,)))
    finished = found.losses.shape[1]
    assert finished < CASE.batches
    assert differing(found, oracle(replace(CASE, batches=finished), delay=1), norms=False) == []


def test_a_signal_in_the_last_batch_ends_a_run_before_its_last_evaluation() -> None:
    """As in Megatron: there may be no time for one."""
    signal = Fault(kind="signal before forward", rank=1, call=CASE.batches * CASE.microbatches - 1)
    flags = ("--exit-signal-handler", "--eval-iters", str(EVALUATION_ITERATIONS))
    found = run(replace(CASE, flags=flags, faults=(signal,)))
    assert found.validation_losses.numel() == 0
    assert differing(found, oracle(CASE, delay=1), norms=False) == []


def _checkpoint(folder: Path, text: str) -> Path:
    folder.mkdir(parents=True)
    (folder / "file").write_text(text)
    return folder


def test_a_complete_checkpoint_takes_the_place_of_another(tmp_path: Path) -> None:
    from megatron_2bw.mcore.checkpoints.folders import replace

    present = _checkpoint(tmp_path / "iter_0000006", "old")
    _checkpoint(tmp_path / "replaced_iter_0000006", "left behind by a killed run")
    replace(present, _checkpoint(tmp_path / "unfinished_iter_0000006", "new"))
    assert [path.name for path in tmp_path.iterdir()] == [present.name]
    assert (present / "file").read_text() == "new"


@pytest.mark.parametrize("saves_there", [True, False])
def test_a_replacement_that_was_stopped_halfway_is_finished_or_taken_back(saves_there: bool, tmp_path: Path) -> None:
    from megatron_2bw.mcore.checkpoints.folders import finish_replacements

    (tmp_path / "latest_checkpointed_iteration.txt").write_text("8")
    _checkpoint(tmp_path / "iter_0000008", "present")
    _checkpoint(tmp_path / "replaced_iter_0000008", "left behind")
    _checkpoint(tmp_path / "unfinished_iter_0000008", "half written by the next save")
    _checkpoint(tmp_path / "iter_0000009", "half written, and not named")
    _checkpoint(tmp_path / "replaced_iter_0000009", "of the run before")
    _checkpoint(tmp_path / "iter_0000007", "of a run without us, which went on to 8")
    _checkpoint(tmp_path / "replaced_iter_0000007", "older")
    finish_replacements(tmp_path, saves_there=saves_there)
    files = {path.parent.name: path.read_text() for path in tmp_path.glob("*/file")}
    assert files.pop("iter_0000008") == "present"
    assert (files.pop("iter_0000007"), files.pop("replaced_iter_0000007")[:5]) == (
        "of a run without us, which went on to 8",
        "older",
    )
    if saves_there:
        assert files == {"iter_0000009": "of the run before"}
    else:  # Another job may be saving.
        assert files == {
            "unfinished_iter_0000008": "half written by the next save",
            "iter_0000009": "half written, and not named",
            "replaced_iter_0000009": "of the run before",
        }


@pytest.mark.parametrize("saves_there", [True, False])
def test_a_replacement_that_was_stopped_between_its_renames_is_finished(saves_there: bool, tmp_path: Path) -> None:
    from megatron_2bw.mcore.checkpoints.folders import finish_replacements

    (tmp_path / "latest_checkpointed_iteration.txt").write_text("6")
    _checkpoint(tmp_path / "replaced_iter_0000006", "old")
    _checkpoint(tmp_path / "unfinished_iter_0000006", "new")
    finish_replacements(tmp_path, saves_there=saves_there)
    assert {path.parent.name: path.read_text() for path in tmp_path.glob("*/file")} == {"iter_0000006": "new"}


def test_a_link_to_a_checkpoint_goes_and_the_checkpoint_stays(tmp_path: Path) -> None:
    from megatron_2bw.mcore.checkpoints.folders import replace

    target = _checkpoint(tmp_path / "elsewhere" / "iter_0000006", "old")
    present = tmp_path / "iter_0000006"
    present.symlink_to(target)
    replace(present, _checkpoint(tmp_path / "unfinished_iter_0000006", "new"))
    assert not present.is_symlink()
    assert (present / "file").read_text() == "new"
    assert (target / "file").read_text() == "old"


@pytest.mark.parametrize(("tracker", "left"), [("4", ["iter_0000004"]), ("8", []), (None, [])])
def test_of_non_persistent_checkpoints_only_the_named_one_stays(
    tracker: str | None, left: list[str], tmp_path: Path
) -> None:
    from megatron_2bw.mcore.checkpoints.folders import remove_all_but_the_named

    for iteration in (2, 4, 6):
        _checkpoint(tmp_path / f"iter_{iteration:07d}", "")
    if tracker is not None:
        (tmp_path / "latest_checkpointed_iteration.txt").write_text(tracker)
    remove_all_but_the_named(tmp_path)
    assert [path.name for path in tmp_path.glob("iter_*")] == left


@pytest.mark.skipif(megatron_version() < "0.19", reason="Megatron 0.18 loads no GPT into a hybrid model")
@pytest.mark.parametrize("saved", ["torch_dist"], indirect=True)
@pytest.mark.parametrize(("more", "alike"), [((), CASE.batches), (("--finetune",), 2)], ids=["resumed", "finetuned"])
def test_a_hybrid_model_goes_on_from_a_gpt(saved: Saved, more: tuple[str, ...], alike: int) -> None:
    """As the GPT does, with both weight versions; finetuned, from the newest alone.

    Then Megatron gives the states of optimizer and scheduler to the hybrid model alone: two batches are alike.
    """
    flags = (*saved.opened(INTERVAL), *more)
    hybrid = ("--hybrid-layer-pattern", "*-|*-")
    found, expected = run(replace(CASE, kind="hybrid", model=hybrid, flags=flags)), run(replace(CASE, flags=flags))
    assert torch.equal(found.losses[:, :alike], expected.losses[:, :alike])
    assert more or found.rates == expected.rates


@pytest.mark.parametrize("flag", ["finetune", "no_load_optim", None])
def test_older_versions_belong_to_the_optimizers_state(flag, monkeypatch) -> None:
    from megatron_2bw.mcore.checkpoints import checkpoint

    args = SimpleNamespace(finetune=False, no_load_optim=False, pipeline_schedule="2bw", synchronous_warmup_iters=0)
    if flag is not None:
        setattr(args, flag, True)
    restored = []
    monkeypatch.setattr(checkpoint, "get_args", lambda: args)
    monkeypatch.setattr(checkpoint, "_restore", lambda *_: restored.append(1))
    checkpoints = checkpoint.Checkpoints()

    def load(model, optimizer):
        checkpoints.read(({"megatron_2bw": {"manifest": {"schedule": "2bw", "versions": [5, 6]}}}, "", False, None))
        return 6, 0

    checkpoints.load(load, None, MagicMock())
    assert bool(restored) == (flag is None)


def test_no_save_optim_leaves_older_versions_out(monkeypatch) -> None:
    from megatron_2bw.mcore.checkpoints import checkpoint

    monkeypatch.setattr(checkpoint, "_manifest", lambda *_: {"versions": [6]})
    for leaves_out in (True, False):
        state: dict = {}
        args = SimpleNamespace(no_save_optim=leaves_out)
        checkpoint.Checkpoints().add_to(state, args, None, None, is_loading=False, iteration=6)
        assert (checkpoint.ENTRY in state) is not leaves_out


def test_what_is_on_the_host_is_copied_before_another_process_writes_it() -> None:
    """With a GPU, too: the part of an optimizer that is there."""
    from megatron_2bw.mcore.checkpoints.asynchronous import copied

    on_host, elsewhere = torch.zeros(2), torch.zeros(2, device="meta")
    writer = SimpleNamespace()

    def prepare(self: SimpleNamespace) -> None:
        self.write_buckets = [("file", "key", ([], [("one", on_host), ("two", elsewhere)]))]

    copied(prepare)(writer)
    ((_, _, (_, [(_, first), (_, second)])),) = writer.write_buckets
    on_host += 1
    assert first.tolist() == [0, 0]
    assert second is elsewhere
