"""A small BERT: its samples, its model and its loss."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.bert.bert_layer_specs import bert_layer_local_spec
from megatron.core.models.bert.bert_model import BertModel

from .case import SEQUENCE_LENGTH, VOCABULARY
from .gpt import sequence

MASK = VOCABULARY - 1


def sample(index: int) -> dict[str, torch.Tensor]:
    """Two passages, the second of which may belong elsewhere; some tokens are masked, and the last ones padding."""
    half, unrelated = SEQUENCE_LENGTH // 2, index % 2
    tokens = sequence(index, SEQUENCE_LENGTH, MASK)
    if unrelated:
        tokens[half:] = sequence(index + 17, half, MASK)
    positions = torch.arange(SEQUENCE_LENGTH)
    present = positions < SEQUENCE_LENGTH - index % 4
    masked = present & ((positions + index) % 5 < 1 + index % 2)
    return {
        "text": torch.where(masked, MASK, tokens) * present,
        "types": (positions >= half).long(),
        "labels": torch.where(masked, tokens, -1),
        "loss_mask": masked.long(),
        "padding_mask": present.long(),
        "is_random": torch.tensor(unrelated),
    }


def build(args: Any, config: Any, **keywords: Any) -> BertModel:
    """One stage."""
    return BertModel(config=config, num_tokentypes=2, transformer_layer_spec=bert_layer_local_spec, **keywords)


def reads_data() -> bool:
    """Every stage masks the padding out."""
    return True


def run(model: Any, batch: dict[str, torch.Tensor]) -> Any:
    """Losses per token, and whether the passages follow each other, on the last stage; activations elsewhere."""
    return model(batch["text"], batch["padding_mask"], tokentype_ids=batch["types"], lm_labels=batch["labels"])


def summed_loss(
    output: tuple[torch.Tensor, torch.Tensor], batch: dict[str, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Over the masked tokens, with the mean loss of the passages' order once for each of them; and their number."""
    losses, order = output
    mask = batch["loss_mask"].view(-1)
    tokens = mask.sum().to(torch.int)
    of_order = torch.nn.functional.cross_entropy(order.float(), batch["is_random"])
    return torch.sum(losses.view(-1).float() * mask) + of_order * tokens, tokens
