"""A 2BW run that is stopped and continued computes what it would have computed without the stop."""

from __future__ import annotations

import os
import re
import shutil
import signal
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch

from megatron_2bw.mcore.symbols import megatron_version

from .case import Case
from .compare import FLOOR, deviation, differing
from .features import BIASED, EXPERTS, SEVERAL_TOKENS, SHARDED_BY_LAYERS
from .harness import collect, launch, merge, run
from .interrupted import Kill, killed, slow_to_write
from .oracle import oracle
from .saved import (
    ASYNCHRONOUS,
    BATCHES,
    CASE,
    DETERMINED,
    FORMATS,
    TRACKER,
    Saved,
    assert_continues,
    rest,
    resume,
    save,
    saving,
)
from .worker import main

TWO_REPLICAS = replace(CASE, replicas=2, distributed_optimizer=True, precision="bf16")
TWO_REPLICAS_IN_FP16 = replace(CASE, replicas=2, distributed_optimizer=True, precision="fp16")
IN_FP16 = replace(CASE, precision="fp16")
FILES_PER_SAVE = 2 if megatron_version().startswith("0.18") else 1
"""At most, of a rank."""


@pytest.fixture(scope="module", params=FORMATS)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return save(CASE, tmp_path_factory.mktemp(request.param), request.param)


@pytest.mark.parametrize("iteration", [1, 6, BATCHES - 1])
def test_a_resumed_run_is_the_uninterrupted_one(saved: Saved, iteration: int) -> None:
    assert_continues(saved.resumed(iteration), saved.results, iteration)


@pytest.mark.parametrize(
    ("case", "format_"),
    [
        pytest.param(TWO_REPLICAS_IN_FP16, "torch", id="distributed-torch"),
        pytest.param(TWO_REPLICAS_IN_FP16, "torch_dist", id="distributed-torch_dist"),
        pytest.param(IN_FP16, "torch_dist", id="torch_dist"),
        pytest.param(replace(IN_FP16, optimizer="sgd"), "torch_dist", id="sgd"),
        pytest.param(replace(IN_FP16, schedule="1f1b-flush"), "torch_dist", id="1f1b-flush"),
        *(
            pytest.param(replace(TWO_REPLICAS_IN_FP16, moments="fp32"), format_, id=f"precision-aware-{format_}")
            for format_ in FORMATS
        ),
    ],
)
def test_a_run_without_an_update_so_far(case: Case, format_: str, tmp_path: Path) -> None:
    """The loss scale is too large for the first batches; two of them are skipped before it halves."""
    case = replace(case, batches=8, model=(*CASE.model, "--initial-loss-scale", str(2**22)))
    saved = save(case, tmp_path, format_)
    is_skipped = saved.results.norms.isnan()
    assert is_skipped[:4].all()
    assert not is_skipped.all()
    assert_continues(saved.resumed(2), saved.results, 2)


@pytest.mark.parametrize(
    ("case", "format_"),
    [
        pytest.param(IN_FP16, "torch_dist", id="fp16"),  # The scale has just grown.
        pytest.param(replace(CASE, replicas=2, distributed_optimizer=True), "torch", id="distributed-fp32"),
        pytest.param(TWO_REPLICAS, "torch_dist", id="distributed-bf16"),
        pytest.param(
            replace(CASE, replicas=4, distributed_optimizer=True, instances=2, precision="fp16"),
            "torch_dist",
            id="two-instances-fp16",
        ),
        pytest.param(
            replace(TWO_REPLICAS, moments="bf16"),
            "torch_dist",
            id="precision-aware-bf16",
        ),
        pytest.param(
            replace(TWO_REPLICAS_IN_FP16, moments="fp32"),
            "torch",
            id="precision-aware-fp16",
        ),
        pytest.param(replace(TWO_REPLICAS, offloaded=0.5), "torch_dist", id="a-part-on-the-host-bf16"),
        pytest.param(
            replace(TWO_REPLICAS, offloaded=0.5, flags=("--dist-ckpt-optim-fully-reshardable",)),
            "torch_dist",
            id="a-part-on-the-host-reshardable",
        ),
        pytest.param(replace(TWO_REPLICAS, offloaded=1.0, precision="fp16"), "torch_dist", id="all-on-the-host-fp16"),
        pytest.param(replace(CASE, flags=("--dataloader-type", "cyclic")), "torch_dist", id="data-in-another-order"),
        pytest.param(replace(DETERMINED, model=BIASED), "torch_dist", id="biases-of-experts"),
        pytest.param(replace(DETERMINED, model=BIASED, precision="bf16"), "torch", id="biases-of-experts-bf16"),
        pytest.param(replace(DETERMINED, model=SEVERAL_TOKENS, precision="bf16"), "torch_dist", id="several-tokens"),
        pytest.param(replace(CASE, optimizer="sgd"), "torch_dist", id="sgd"),
        pytest.param(replace(CASE, optimizer="sgd", precision="bf16"), "torch_dist", id="sgd-bf16"),
        pytest.param(replace(CASE, optimizer="soap", precision="bf16"), "torch", id="soap-bf16"),
        pytest.param(replace(SHARDED_BY_LAYERS, record_gradients=False), "torch_dist", id="muon-distributed"),
        *(
            pytest.param(
                replace(TWO_REPLICAS, expert_parallel=2, model=(*EXPERTS, "--moe-layer-freq", frequency)),
                format_,
                id=f"experts-{frequency}-{format_}",
            )
            for frequency, format_ in (("([0,1])", "torch_dist"), ("([1,0])", "torch"))
        ),
    ],
)
def test_precisions_optimizers_and_models(case: Case, format_: str, tmp_path: Path) -> None:
    whole = save(case, tmp_path, format_, interval=5)
    assert_continues(whole.resumed(10), whole.results, 10)


def test_an_evaluation_that_draws_random_numbers(tmp_path: Path) -> None:
    """It comes after the first forwards of the next batch, which a resumed run repeats from the state before them."""
    model = (*EXPERTS, "--moe-input-jitter-eps", "0.01")
    case = replace(DETERMINED, model=model, flags=("--eval-interval", "2", "--eval-iters", "1"))
    whole = save(case, tmp_path, "torch_dist", interval=4)
    assert_continues(whole.resumed(8), whole.results, 8)


@pytest.mark.parametrize(
    "kill",
    [
        Kill(rank=1, place="forward", call=11),
        Kill(rank=0, place="save", call=3 * FILES_PER_SAVE),
    ],
    ids=lambda kill: f"{kill.place}-rank{kill.rank}",
)
def test_a_killed_run_goes_on_from_its_newest_complete_checkpoint(saved: Saved, kill: Kill, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    case = saving(CASE, folder, saved.format)
    ended = launch(partial(killed, kill=kill), case, tmp_path)
    assert ended.exit_codes == [-signal.SIGKILL if rank == kill.rank else 1 for rank in range(case.ranks)], (
        ended.tails()
    )
    complete = int((folder / TRACKER).read_text())
    assert 3 <= complete < BATCHES
    assert_continues(resume(CASE, folder, saved.format), saved.results, complete)


@pytest.mark.parametrize("schedule", ["2bw", "1f1b-flush"])
def test_a_chosen_step_is_loaded_whole(schedule: str, tmp_path: Path) -> None:
    """In the torch format Megatron would take the distributed optimizer's state of the newest checkpoint."""
    case = replace(DETERMINED, schedule=schedule, microbatches=2, replicas=2, distributed_optimizer=True)
    whole = save(case, tmp_path, "torch", interval=4)
    for format_ in FORMATS:  # Of the flags: what is read is found out from the folder.
        flags = ("--load", str(tmp_path), "--ckpt-step", "4", "--ckpt-format", format_)
        assert_continues(run(replace(case, flags=flags)), whole.results, 4)


@pytest.mark.parametrize(
    "more", [(), ("--ckpt-step", "1"), ("--use-checkpoint-args",)], ids=["newest", "chosen", "its arguments"]
)
def test_a_run_that_cannot_read_its_checkpoint_fails(more: tuple[str, ...], tmp_path: Path) -> None:
    """Megatron would print an error and end as if training were done."""
    case = replace(CASE, batches=1)
    save(case, tmp_path, "torch")
    for damaged in (tmp_path / "iter_0000001").glob("mp_rank_*/model_optim_rng.pt"):
        os.truncate(damaged, 1000)
    if "--ckpt-step" in more:
        (tmp_path / TRACKER).unlink()
    ended = launch(main, replace(case, flags=("--load", str(tmp_path), "--ckpt-format", "torch", *more)), tmp_path)
    assert all(ended.exit_codes), ended.tails()
    assert f"the checkpoint in {tmp_path} is damaged: Megatron cannot read it" in ended.outputs[1]


def test_a_run_that_cannot_go_on_from_its_checkpoint_fails(tmp_path: Path) -> None:
    """Not because it were damaged: it lacks the random state that is asked for."""
    case = replace(CASE, batches=1)
    run(saving(case, tmp_path, "torch", 1, "--no-save-rng"))
    ended = launch(main, replace(case, flags=("--load", str(tmp_path), "--ckpt-format", "torch")), tmp_path)
    assert all(ended.exit_codes), ended.tails()
    assert f"Megatron could not go on from the checkpoint in {tmp_path}; it says why above" in ended.outputs[1]


def copy(saved: Saved, folder: Path, *iterations: int) -> None:
    """Checkpoints of a run; the tracker file names the last one."""
    for iteration in iterations:
        name = f"iter_{iteration:07d}"
        shutil.copytree(saved.folder / name, folder / name)
        (folder / TRACKER).write_text(str(iteration))


def contents(folder: Path) -> dict[Path, bytes]:
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def kill_in_first_save(case: Case, folder: Path) -> None:
    ended = launch(partial(killed, kill=Kill(rank=1, place="save", call=0)), case, folder)
    assert ended.exit_codes == [1, -signal.SIGKILL], ended.tails()


def test_a_killed_save_does_not_leave_a_mixture_of_two_runs(saved: Saved, tmp_path: Path) -> None:
    """Killed while it overwrites the checkpoint that Megatron's tracker file names."""
    folder = tmp_path / "checkpoints"
    copy(saved, folder, 5, 6)
    kill_in_first_save(saving(CASE, folder, saved.format, 1, "--load", str(folder), "--ckpt-step", "5"), tmp_path)
    assert (folder / TRACKER).read_text() == "6"
    assert_continues(resume(CASE, folder, saved.format), saved.results, 6)


def test_a_killed_save_keeps_the_checkpoint_that_the_run_has_loaded(saved: Saved, tmp_path: Path) -> None:
    """The only one: a finished run that is started again saves its last batch once more."""
    folder = tmp_path / "checkpoints"
    copy(saved, folder, BATCHES)
    kill_in_first_save(saving(CASE, folder, saved.format, BATCHES - 1, "--load", str(folder)), tmp_path)
    assert (folder / TRACKER).read_text() == str(BATCHES)
    name = f"iter_{BATCHES:07d}"
    assert contents(folder / name) == contents(saved.folder / name)


@pytest.mark.parametrize("saved", ["torch_dist"], indirect=True)
def test_a_killed_non_persistent_save_keeps_the_one_before_it(saved: Saved, tmp_path: Path) -> None:
    """A killed run has left half of checkpoint 6, and the next one is killed there, too."""
    folder = tmp_path / "checkpoints"
    copy(saved, folder / "non_persistent", 6, 5)
    (folder / "non_persistent" / "iter_0000006" / "metadata.json").unlink()
    non_persistent = ("--non-persistent-ckpt-type", "global", "--non-persistent-save-interval", "1")
    kill_in_first_save(saving(CASE, folder, saved.format, BATCHES, "--load", str(folder), *non_persistent), tmp_path)
    assert (folder / "non_persistent" / TRACKER).read_text() == "5"
    resuming = replace(CASE, flags=non_persistent)
    assert_continues(resume(resuming, folder, saved.format), saved.results, 5)


@pytest.mark.parametrize("saved", ["torch_dist"], indirect=True)
def test_a_killed_non_persistent_save_leaves_no_mixture(saved: Saved, tmp_path: Path) -> None:
    """Killed while it overwrites the checkpoint of an earlier run in the same folder."""
    folder = tmp_path / "checkpoints"
    copy(saved, folder / "non_persistent", 6)
    (saved.folder / TRACKER).write_text("5")
    non_persistent = ("--non-persistent-ckpt-type", "global", "--non-persistent-save-interval", "1")
    from_saved = ("--load", str(saved.folder))
    kill_in_first_save(saving(CASE, folder, saved.format, BATCHES, *from_saved, *non_persistent), tmp_path)
    assert (folder / "non_persistent" / TRACKER).read_text() == "6"
    assert contents(folder / "non_persistent" / "iter_0000006") == contents(saved.folder / "iter_0000006")


@pytest.mark.parametrize(
    ("saved", "flags"),
    [("torch", ()), ("torch_dist", ()), ("torch_dist", ASYNCHRONOUS)],
    indirect=["saved"],
    ids=["torch", "torch_dist", "torch_dist-asynchronous"],
)
def test_an_overwritten_checkpoint_is_the_new_one(saved: Saved, flags: tuple[str, ...], tmp_path: Path) -> None:
    """It continues with the numbers of the run that wrote it, and nothing is left beside it."""
    folder = tmp_path / "checkpoints"
    copy(saved, folder, 5, 6)
    other = replace(CASE, clip=0.5)
    case = saving(other, folder, saved.format, 6, "--load", str(folder), "--ckpt-step", "5", *flags)
    overwriting = merge(ended := collect(_with_artifacts, case), case)
    artifacts = re.findall(r"artifact file://(\S+) as (\S+)", ended[-1].output)
    names = [f"iter_{i:07d}" for i in (6, BATCHES)]
    assert [Path(path).relative_to(folder).parts[0] for path, _ in artifacts] == names
    assert [version for _, version in artifacts] == (names if saved.format == "torch_dist" else ["model_optim_rng"] * 2)
    assert sorted(path.name for path in folder.glob("*iter*")) == [f"iter_{i:07d}" for i in (5, 6, BATCHES)] + [TRACKER]
    (folder / TRACKER).write_text("6")
    found = resume(other, folder, saved.format)
    assert differing(found, rest(overwriting, 1)) == []


def _with_artifacts(case: Case, rank: int, port: int, folder: Path) -> None:
    """Say what W&B is told of checkpoints."""
    from megatron.training import wandb_utils

    writer = MagicMock()
    artifact = writer.Artifact.return_value
    writer.run.entity, writer.run.project = "entity", "project"
    writer.run.log_artifact = lambda _, aliases: print(
        "artifact", artifact.add_reference.call_args.args[0], "as", *aliases, flush=True
    )
    wandb_utils.get_wandb_writer = lambda: writer
    main(case, rank, port, folder)


def test_an_asynchronous_save_holds_what_it_was_started_with(tmp_path: Path) -> None:
    """It is written while training changes both weight versions and the state of the optimizer."""
    case = saving(CASE, tmp_path, "torch_dist", 5, *ASYNCHRONOUS)
    whole = merge(collect(partial(slow_to_write, seconds=1.0), case), case)
    assert differing(whole, run(CASE)) == []
    assert_continues(Saved(CASE, tmp_path, "torch_dist", whole).resumed(5), whole, 5)


@pytest.fixture(scope="module", params=FORMATS)
def determined(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return save(DETERMINED, tmp_path_factory.mktemp(request.param), request.param, 6)


@pytest.mark.parametrize("schedule", ["megatron", "1f1b-flush"])
def test_an_ordinary_schedule_goes_on_with_the_newest_weights(determined: Saved, schedule: str) -> None:
    found = determined.resumed(6, replace(DETERMINED, schedule=schedule))
    expected = rest(oracle(DETERMINED, delay=1, delayed_batches=6), 6)
    assert differing(found, expected, norms=False) == []
    assert found.rates == expected.rates


@pytest.mark.parametrize(("precision", "format_"), [("fp32", "torch"), ("fp16", "torch_dist")])
def test_2bw_goes_on_from_megatrons_checkpoint_with_one_version(precision: str, format_: str, tmp_path: Path) -> None:
    """The two batches after it both use its weights, as those after the initial weights do."""
    case = replace(DETERMINED, precision=precision)
    stock = save(replace(case, schedule=None), tmp_path, format_, 6)
    found = stock.resumed(6, case)
    expected = rest(oracle(case, delay=1, ordinary_batches=6), 6)
    assert differing(found, expected, norms=False) == []
    assert found.rates == expected.rates


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"stages": 4}, id="PP4"),
        pytest.param({"replicas": 2, "microbatches": 2}, id="PP2xDP2"),
        pytest.param({"tensor_parallel": 2}, id="PP2xTP2"),
    ],
)
@pytest.mark.parametrize("determined", ["torch_dist"], indirect=True)
def test_another_layout_goes_on_with_both_versions(determined: Saved, changes: dict[str, int]) -> None:
    found = determined.resumed(6, replace(DETERMINED, **changes))
    expected = rest(oracle(DETERMINED, delay=1), 6)
    found = replace(found, losses=_in_order_of_samples(found.losses))
    expected = replace(expected, losses=_in_order_of_samples(expected.losses))
    assert max(deviation(found, expected)) <= FLOOR


def _in_order_of_samples(losses: torch.Tensor) -> torch.Tensor:
    """(replicas, batches, microbatches) to (1, batches, microbatches of all replicas)."""
    return losses.permute(1, 2, 0).flatten(1).unsqueeze(0)
