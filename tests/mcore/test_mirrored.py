"""Pipelines in both directions on Megatron against synchronous training in a single process."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_2bw.mcore.symbols import megatron_version

from . import by_config, two_nodes
from .case import Case, Fault
from .compare import FLOOR, deviation, differing
from .faults import INFINITE_GRADIENT
from .harness import Ended, Results, collect, launch, merge, run
from .matrix import compared
from .oracle import oracle
from .saved import DROPOUT, assert_continues, rest, save

GEMS = Case(schedule="gems", stages=2, microbatches=4, batches=12, tied=False)
CHIMERA = replace(GEMS, schedule="chimera")
MIXPIPE = replace(GEMS, schedule="mixpipe", stages=4, flags=("--mixpipe-k", "2", "--mixpipe-gamma", "1"))

CASES = {
    "gems, d2, 2 replicas": replace(GEMS, replicas=2),
    "gems, d4": replace(GEMS, stages=4),
    "chimera, d2, 2 replicas": replace(CHIMERA, replicas=2),
    "chimera, d4": replace(CHIMERA, stages=4),
    "chimera, d4, two units": replace(CHIMERA, stages=4, microbatches=8),
    "mixpipe, d4": MIXPIPE,
    "mixpipe, d2, 2 replicas": replace(MIXPIPE, stages=2, microbatches=2, replicas=2, flags=()),
    "mixpipe, d4, 2 replicas": replace(MIXPIPE, replicas=2),
    "mixpipe, d4, many microbatches": replace(MIXPIPE, microbatches=10, flags=()),
    "chimera, bf16, distributed optimizer, 2 replicas, uneven stages": replace(
        CHIMERA,
        layers=4,
        precision="bf16",
        replicas=2,
        distributed_optimizer=True,
        flags=tuple("--decoder-first-pipeline-num-layers 1 --decoder-last-pipeline-num-layers 3".split()),
    ),
    "chimera, precision-aware optimizer, 2 replicas": replace(
        CHIMERA, precision="bf16", replicas=2, distributed_optimizer=True, moments="bf16"
    ),
    "chimera, bf16, tensor parallel, recompute": replace(
        CHIMERA, precision="bf16", tensor_parallel=2, recompute="full", microbatches=2
    ),
    "chimera, fused gradients": replace(CHIMERA, fused_gradients=True),
    "chimera, loss per token": replace(CHIMERA, model=("--calculate-per-token-loss",)),
}


@pytest.mark.parametrize("name", CASES)
def test_equal_to_the_last_bit_untied_without_clipping(name: str) -> None:
    assert compared(replace(CASES[name], record_gradients=True), delay=0).problems() == []


@pytest.mark.parametrize("case", [GEMS, MIXPIPE], ids=lambda case: case.schedule)
def test_equal_to_the_last_bit_tied_and_clipped_by_an_exact_norm(case: Case) -> None:
    """Each weight counts once in the norm, whatever copies there are."""
    clip = oracle(replace(case, tied=True)).norms.median().item()
    comparison = compared(replace(case, tied=True, clip=clip, record_gradients=True), delay=0)
    assert comparison.problems() == []
    assert 0.25 <= comparison.clipped <= 0.75


def test_overflows_of_either_copy_skip_the_update() -> None:
    """Each in another one of the four forwards of a rank, of which two are the mirrored stage's."""
    overflows = {2: 0, 5: 1, 8: 2, 10: 3}
    case = replace(
        CHIMERA,
        precision="fp16",
        clip=1.0,
        record_gradients=True,
        faults=tuple(Fault(kind=INFINITE_GRADIENT, rank=0, call=4 * batch + nth) for batch, nth in overflows.items()),
    )
    assert compared(case, delay=0).problems() == []
    assert run(case).norms.isnan().nonzero().flatten().tolist() == list(overflows)


def test_megatron_logs_the_losses_of_both_directions() -> None:
    """As its own schedule does; the microbatches of one are computed on another rank than it asks."""
    logged = replace(CHIMERA, flags=("--log-interval", "1"))
    found, expected = run(logged), run(replace(logged, schedule=None))
    assert _logged(found) == pytest.approx(_logged(expected), rel=1e-6)
    assert len(_logged(found)) == CHIMERA.batches


def _logged(results: Results | Ended) -> list[float]:
    return [float(word) for word in re.findall(r"lm loss: (\S+)", results.outputs[-1])]


@pytest.mark.skipif(megatron_version().startswith("0.18"), reason="Megatron 0.18 has no config of a GPT")
def test_a_model_built_from_its_config(tmp_path: Path) -> None:
    case = replace(CHIMERA, batches=4, flags=("--log-interval", "1"))
    found, expected = (
        _logged(launch(by_config.main, replace(case, schedule=name), tmp_path)) for name in ("chimera", None)
    )
    assert len(expected) == case.batches
    assert found == pytest.approx(expected, rel=1e-6)


def test_both_copies_of_a_stage_on_one_node() -> None:
    """Of two nodes: ranks 0 and 3 on one, 1 and 2 on the other. The numbers are those of the usual order."""
    case = replace(CHIMERA, stages=4, batches=4)
    records = collect(two_nodes.main, case)
    assert [record.stage for record in records] == [0, 3, 1, 2]
    assert "both copies of every stage on one node" in records[0].output
    found = merge(sorted(records, key=lambda record: record.stage), case)
    assert differing(found, oracle(case), norms=False) == []


@pytest.mark.parametrize(("microbatches", "chosen"), [(4, "K = 4, Gamma = 0"), (8, "no choice of K and Gamma")])
def test_k_and_gamma_by_themselves(microbatches: int, chosen: str) -> None:
    case = replace(MIXPIPE, microbatches=microbatches, batches=3, flags=("--mixpipe-k", "auto"))
    found = run(case)
    assert chosen in found.outputs[0]
    assert differing(found, oracle(case), norms=False) == []


@pytest.mark.parametrize(
    ("stages", "gib", "chosen"), [(4, 80.0, (4, 0)), (4, 7.3, (2, 0)), (4, 1.0, (2, 0)), (8, 8.5, (4, 0))]
)
def test_k_and_gamma_fit_the_memory(
    stages: int, gib: float, chosen: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The paper's formula would take (2, 2) of 8 stages, whose order takes longer than the formula says."""
    from megatron_2bw.mcore.loop import automatic

    words = (
        f"--pipeline-schedule mixpipe --mixpipe-k auto --num-layers {2 * stages} --hidden-size 1024 "
        "--num-attention-heads 16 --seq-length 1024 --vocab-size 50257 --hidden-dropout 0 --attention-dropout 0 --bf16 "
        f"--pipeline-model-parallel-size {stages} --micro-batch-size 8 --global-batch-size {8 * stages}"
    ).split()
    monkeypatch.setattr(automatic, "memory_bytes", lambda: gib * automatic.GIB)
    monkeypatch.setattr(automatic, "_has_fused_attention", lambda: True)
    args = SimpleNamespace(world_size=stages)
    assert f"of {gib:.1f} GiB" in automatic.choose(args, words)
    assert (args.mixpipe_k, args.mixpipe_gamma) == chosen


def test_many_batches_under_random_waits() -> None:
    jitter = tuple(Fault(kind="jitter", rank=rank, seconds=0.002) for rank in range(4))
    case = replace(MIXPIPE, batches=40, faults=jitter)
    assert differing(run(case), oracle(case), norms=False) == []


def test_evaluation_changes_no_number_of_the_training() -> None:
    """It runs down the pipeline, by Megatron's own schedule."""
    evaluating = replace(CHIMERA, flags=("--eval-interval", "5", "--eval-iters", "2"))
    found, expected = run(evaluating), oracle(CHIMERA, evaluate_every=5)
    assert differing(found, expected, norms=False) == []
    assert found.validation_losses.equal(expected.validation_losses)


def test_a_resumed_run_is_the_uninterrupted_one(tmp_path: Path) -> None:
    case = replace(CHIMERA, model=DROPOUT, precision="bf16")
    whole = save(case, tmp_path, "torch_dist", interval=5)
    assert_continues(whole.resumed(5), whole.results, 5)


def test_checkpoints_are_megatrons(tmp_path: Path) -> None:
    """Saved in both directions, continued by Megatron, and the other way round."""
    whole = save(CHIMERA, tmp_path / "mirrored", "torch_dist", interval=6)
    stock = replace(CHIMERA, schedule=None, stages=2)
    assert deviation(whole.resumed(6, stock), rest(whole.results, 6)).losses <= FLOOR
    ordinary = save(stock, tmp_path / "stock", "torch_dist", interval=6)
    assert deviation(ordinary.resumed(6, CHIMERA), rest(ordinary.results, 6)).losses <= FLOOR
