"""The largest attention logits of a batch: they clip the update of that batch, as Megatron clips it."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatron_2bw.mcore.loop import wrappers
from megatron_2bw.mcore.loop.active import active
from megatron_2bw.mcore.updates.attention import AttentionLogits

from .case import Case
from .compare import differing
from .features import GROUPED, LATENT
from .harness import run
from .oracle import oracle
from .saved import assert_continues, save

CLIPPED = Case(
    schedule="2bw", stages=2, microbatches=2, replicas=2, batches=12, precision="bf16", tied=False, clip_attention=0.2
)
MODELS = {"GQA": (GROUPED, 0.2), "latent attention": (LATENT, 0.045)}


@pytest.mark.parametrize("name", MODELS)
def test_the_oracle_clips_as_megatron_does(name: str) -> None:
    model, threshold = MODELS[name]
    case = replace(CLIPPED, schedule="1f1b-flush", model=model, clip_attention=threshold)
    expected = oracle(case)
    assert differing(run(case), expected, norms=False) == []
    assert differing(oracle(replace(case, clip_attention=9.0)), expected, norms=False) != []


def test_evaluation_changes_no_training_number() -> None:
    case = replace(CLIPPED, replicas=1)
    evaluating = replace(case, flags=("--eval-interval", "5", "--eval-iters", "2"))
    found, expected = run(evaluating), oracle(case, delay=1, evaluate_every=5)
    assert differing(found, expected, norms=False) == []
    assert found.validation_losses.equal(expected.validation_losses)


def test_a_resumed_run_goes_on_to_the_last_bit(tmp_path: Path) -> None:
    """Forwards had run ahead into the batch after the checkpoint; what they recorded is recorded again."""
    saved = save(replace(CLIPPED, replicas=1, clip=1.0), tmp_path, "torch_dist", interval=4)
    assert_continues(saved.resumed(4), saved.results, 4)


@pytest.mark.parametrize("clips", [True, False], ids=["clipped", "logged"])
def test_what_is_recorded_belongs_to_its_batch(*, clips: bool) -> None:
    """Forwards of two batches in turn, an evaluation, full recomputation of the first."""
    stage, cores = _stage(clips=clips)
    logits = AttentionLogits(stage)
    assert [layer.self_attention.clipped for layer in stage.decoder.layers] == [[[8.0, 8.0]] * clips, []], "kernels"
    stage.decoder.layers[0].self_attention.clipped.clear()
    for batch, values in [(0, (5.0, 1.0)), (1, (2.0, 2.0)), (None, (90.0, 90.0)), (0, (8.0, 3.0)), (1, (1.0, 9.0))]:
        with logits.computing(batch) if batch is not None else nullcontext():
            for core, value in zip(cores, values, strict=True):
                core.record(value)
    largest, clipped = [], []
    for batch in (0, 1):
        logits.capture(batch)
        logits.reduce(None)
        logits.update()
        largest.append(logits.largest)
        clipped.append([[*layer.self_attention.clipped] for layer in stage.decoder.layers])
    assert largest == [8.0, 9.0]
    of_batches = [[[[8.0, -1.0]], []], [[[8.0, -1.0]], [[9.0, -1.0]]]]
    assert clipped == (of_batches if clips else [[[], []]] * 2)


def test_megatron_logs_what_the_newest_update_was_clipped_by(monkeypatch: pytest.MonkeyPatch) -> None:
    def of_megatron(model: object, log_max_only: bool = False) -> float:
        return 1.0

    for optimizer, logged in ((SimpleNamespace(largest_attention_logit=7.0), 7.0), (None, 1.0)):
        monkeypatch.setattr(active, "session", SimpleNamespace(optimizer=optimizer))
        assert wrappers.largest_attention_logit(of_megatron, [], log_max_only=True) == logged


class _Core(torch.nn.Module):
    current_max_attn_logits: torch.Tensor | None = None

    def record(self, value: float) -> None:
        """Of two heads."""
        found, before = torch.tensor([value, -1.0]), self.current_max_attn_logits
        self.current_max_attn_logits = found if before is None else torch.max(before, found)


class _Attention(torch.nn.Module):
    num_attention_heads_per_partition = 2

    def __init__(self, config: SimpleNamespace) -> None:
        super().__init__()
        self.config = config
        self.core_attention = _Core()
        self.weight = torch.nn.Parameter(torch.ones(1))
        self.clipped: list[list[float]] = []

    def clip_qk(self) -> None:
        self.clipped.append(self.core_attention.current_max_attn_logits.tolist())
        self.core_attention.current_max_attn_logits = None


def _stage(*, clips: bool) -> tuple[torch.nn.Module, list[_Core]]:
    """Two layers, with a threshold of 4."""
    stage = torch.nn.Module()
    stage.config = SimpleNamespace(qk_clip=clips, qk_clip_threshold=4.0, log_max_attention_logit=not clips)
    stage.decoder = torch.nn.Module()
    stage.decoder.layers = torch.nn.ModuleList(torch.nn.Module() for _ in range(2))
    for layer in stage.decoder.layers:
        layer.self_attention = _Attention(stage.config)
    return stage, [layer.self_attention.core_attention for layer in stage.decoder.layers]
