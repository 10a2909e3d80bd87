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
    "first stage, norms too large": replace(CASE, frozen=FIRST_STAGE, norm_limit=0.75),
    "last stage, PipeDream": replace(CASE, schedule="pipedream", microbatches=1, frozen=LAST_STAGE),
}


@pytest.mark.parametrize("name", CASES)
def test_equal_to_the_oracle(name: str) -> None:
    case = CASES[name]
    found = run(case)
    expected = oracle(case, delay=0 if case.schedule == "pipedream" else 1, clipped_as=found)
    assert differing(found, expected, norms=False) == []
    kept = {name for name, weight in found.final.items() if torch.equal(weight, found.initial[name].to(weight.dtype))}
    clipped = "linear_qkv.weight" if case.clip_attention else None  # As Megatron does, trained or not.
    assert kept == {name for name in found.final if name.startswith(case.frozen) and not (clipped and clipped in name)}
    skipped = int(found.norms.isnan().sum())
    assert 0 < skipped < case.batches if case.norm_limit else skipped == 0


def test_full_recomputation_behind_a_frozen_embedding_is_refused() -> None:
    """Megatron's own schedule trains nothing of the first stage then, and says nothing."""
    with pytest.raises(RuntimeError, match="no layer of the first stage would be trained, as its embedding is frozen"):
        run(replace(CASE, frozen=FIRST_STAGE[:1], recompute="full"))


class _Router(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(moe_router_bias_update_rate=0.0)
        self.register_buffer("expert_bias", torch.zeros(2))
        self.register_buffer("local_tokens_per_expert", torch.tensor([3.0, 1.0]))
        self.frozen_expert_bias = False

    def _maintain_float32_expert_bias(self) -> None:
        pass


def test_a_bias_of_experts_moves_while_it_is_not_frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron asks after every batch, and for the rate, too."""
    from megatron_2bw.mcore.updates import routers

    def moved(tokens: torch.Tensor, bias: torch.Tensor, rate: float, *, tp_dp_cp_group: None) -> torch.Tensor:
        return bias + rate

    monkeypatch.setattr(routers, "get_updated_expert_bias", moved)
    router = _Router()
    ours = routers.Routers(router)
    for batch, (rate, frozen, expected) in enumerate([(0.5, True, 0.0), (0.5, False, 0.5), (1.0, False, 1.5)]):
        router.config.moe_router_bias_update_rate, router.frozen_expert_bias = rate, frozen
        ours.use(batch)
        ours.capture(batch)
        ours.reduce(None)
        ours.update()
        assert router.expert_bias.tolist() == [expected, expected]
