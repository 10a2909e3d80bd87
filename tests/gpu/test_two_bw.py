"""2BW on a GPU, several ranks on one device: the tests of ``tests/mcore`` where the device could make a difference."""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import pytest

from tests.mcore.case import Case, Fault
from tests.mcore.compare import differing
from tests.mcore.faults import INFINITE_GRADIENT
from tests.mcore.features import EXPERTS, GROUPED, IN_BF16, LLAMA
from tests.mcore.harness import collect, run
from tests.mcore.matrix import compared
from tests.mcore.memory import Memory, measure
from tests.mcore.oracle import oracle

pytestmark = pytest.mark.gpu

HAS_ENGINE = importlib.util.find_spec("transformer_engine") is not None
HAS_APEX = importlib.util.find_spec("apex") is not None
OF_LLAMA = (*LLAMA, "--transformer-impl", "transformer_engine") if HAS_ENGINE else LLAMA

CASE = Case(
    schedule="2bw", stages=2, microbatches=2, batches=12, clip=1.0, tied=True, record_gradients=True, device="cuda"
)
TWO_REPLICAS = replace(CASE, replicas=2)
SETTINGS = {
    "fp32": CASE,
    "bf16": replace(CASE, precision="bf16"),
    "fp16, four stages": replace(CASE, precision="fp16", stages=4, microbatches=4),
    "tightest fit": replace(CASE, stages=4, microbatches=3, tied=False),
    "bf16, one more in flight": replace(
        CASE, precision="bf16", microbatches=4, flags=("--pipeline-extra-in-flight", "1")
    ),
    "bf16, half of a batch delayed": replace(CASE, precision="bf16", microbatches=4, delayed=2),
    "bf16, full recompute": replace(CASE, precision="bf16", recompute="full"),
    "bf16, two replicas": replace(TWO_REPLICAS, precision="bf16"),
    "bf16, distributed optimizer": replace(TWO_REPLICAS, precision="bf16", distributed_optimizer=True),
    "gradients in bf16, distributed optimizer": replace(
        TWO_REPLICAS, model=IN_BF16, precision="bf16", distributed_optimizer=True
    ),
    "bf16, precision-aware optimizer": replace(
        TWO_REPLICAS, precision="bf16", distributed_optimizer=True, moments="bf16"
    ),
    "fp16, distributed optimizer, one gradient buffer": replace(
        TWO_REPLICAS,
        precision="fp16",
        distributed_optimizer=True,
        flags=("--pipeline-gradient-buffers", "1"),
    ),
    "GQA, SwiGLU, RoPE, RMSNorm, bf16": replace(CASE, model=OF_LLAMA, precision="bf16", tied=False),
    "clipped attention, bf16": replace(CASE, model=GROUPED, precision="bf16", tied=False, clip_attention=0.2),
    "experts, bf16": replace(CASE, model=EXPERTS, precision="bf16", tied=False),
}


@pytest.mark.parametrize("case", SETTINGS.values(), ids=SETTINGS)
def test_equal_to_the_oracle(case: Case) -> None:
    if case.model == LLAMA and HAS_APEX:
        pytest.skip("Megatron's own layers have no RMSNorm beside Apex")
    comparison = compared(case)
    assert comparison.problems() == []
    assert comparison.clipped > 0


def test_equal_to_the_oracle_where_operators_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron's default; the other tests do without, because it takes longer than all else that they do."""
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "0")
    comparison = compared(replace(CASE, precision="bf16", batches=11))  # A run that no other test has made.
    assert comparison.problems() == []


@pytest.mark.skipif(
    importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is None, reason="needs Apex's fused weight gradients"
)
@pytest.mark.parametrize("layers", ["local", *(["transformer_engine"] if HAS_ENGINE else [])])
def test_weight_gradients_fused_into_the_buffer(layers: str) -> None:
    """Megatron's default where Apex is installed: the buffer is captured when the forward runs."""
    case = replace(CASE, precision="bf16", fused_gradients=True, model=("--transformer-impl", layers))
    comparison = compared(case)
    assert comparison.problems() == []


@pytest.mark.skipif(not HAS_ENGINE, reason="needs Transformer Engine's attention")
def test_attention_that_records_its_logits() -> None:
    model = (*GROUPED, "--transformer-impl", "transformer_engine")
    case = replace(CASE, precision="bf16", tied=False, model=model, clip_attention=0.2)
    assert compared(case).problems() == []
    unclipped = oracle(replace(case, clip_attention=9.0), delay=1)
    assert differing(oracle(case, delay=1), unclipped, norms=False) != []


def test_a_part_of_the_update_on_the_host() -> None:
    """What the host rounds in its own way no oracle follows, so without a delay, and beside Megatron's schedule."""
    case = replace(CASE, precision="bf16", distributed_optimizer=True, offloaded=0.5, clip=0.0, tied=False)
    synchronous = replace(case, synchronous=case.batches)
    assert differing(run(synchronous), run(replace(case, schedule="1f1b-flush")), norms=False) == []


def test_an_overflow_skips_the_batch_of_the_oracle() -> None:
    infinite = Fault(kind=INFINITE_GRADIENT, rank=0, call=7)
    comparison = compared(replace(CASE, precision="fp16", faults=(infinite,)))
    assert comparison.problems() == []


def test_many_batches_repeat() -> None:
    """A missing wait between streams shows now and then."""
    case = replace(CASE, precision="bf16", batches=150, record_gradients=False)
    found = run(case)
    assert differing(found, oracle(case, delay=1, clipped_as=found), norms=False) == []


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_peak_has_one_more_copy_of_weights_and_gradients(precision: str) -> None:
    large = ("--num-layers", "8", "--hidden-size", "1024")
    case = Case(schedule="2bw", stages=2, microbatches=2, batches=8, precision=precision, device="cuda", flags=large)
    ours, theirs = memory_of(case), memory_of(replace(case, schedule="1f1b-flush"))
    for stage, (two_bw, flush) in enumerate(zip(ours, theirs, strict=True)):
        assert two_bw.peak - flush.peak == pytest.approx(two_bw.weights + two_bw.gradients, rel=0.05)
        assert two_bw.in_flight == flush.in_flight == case.stages - stage


def memory_of(case: Case) -> list[Memory]:
    return collect(measure, case)
