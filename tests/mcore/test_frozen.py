"""Models of which only a part is trained, beside the oracle."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from .case import Case
from .compare import differing
from .harness import run
from .oracle import oracle

CASE = Case(schedule="2bw", stages=2, microbatches=4, batches=8, tied=False)
FIRST_STAGE = ("embedding.", "decoder.layers.0.")
LAST_STAGE = ("decoder.layers.1.", "decoder.final", "output")
CASES = {
    "tied embedding": replace(CASE, tied=True, frozen=("embedding.word_embeddings.", "output_layer.")),
    "lower layers": replace(CASE, frozen=FIRST_STAGE[1:]),
    "first stage": replace(CASE, frozen=FIRST_STAGE),
    "first stage, one buffer": replace(CASE, frozen=FIRST_STAGE, flags=("--pipeline-gradient-buffers", "1")),
    "first stage, bf16, distributed optimizer": replace(
        CASE, frozen=FIRST_STAGE, precision="bf16", replicas=2, microbatches=2, distributed_optimizer=True
    ),
    "last stage, fp16": replace(CASE, frozen=LAST_STAGE, precision="fp16"),
    "first stage, clipping, lead, half delayed": replace(CASE, frozen=FIRST_STAGE, clip=0.5, lead=2.0, delayed=2),
    "clipped attention, one buffer": replace(
        CASE, frozen=FIRST_STAGE[1:], clip_attention=0.05, flags=("--pipeline-gradient-buffers", "1")
    ),
    "last stage, PipeDream": replace(CASE, schedule="pipedream", microbatches=1, frozen=LAST_STAGE),
}


@pytest.mark.parametrize("name", CASES)
def test_equal_to_the_oracle(name: str) -> None:
    case = CASES[name]
    found = run(case)
    expected = oracle(case, delay=0 if case.schedule == "pipedream" else 1, clipped_as=found)
    assert differing(found, expected, norms=False) == []


class _Router(torch.nn.Module):
    def __init__(self, frozen: bool) -> None:
        super().__init__()
        self.config = SimpleNamespace(moe_router_bias_update_rate=0.1)
        self.register_buffer("expert_bias", torch.zeros(2))
        self.register_buffer("local_tokens_per_expert", torch.tensor([3.0, 1.0]))
        self.frozen_expert_bias = frozen

    def _maintain_float32_expert_bias(self) -> None:
        pass


@pytest.mark.parametrize("frozen", [True, False])
def test_a_frozen_bias_of_experts_stays_as_it_is(frozen: bool) -> None:
    from megatron_2bw.mcore.updates.routers import Routers

    assert len(Routers(_Router(frozen)).biases) == (not frozen)
