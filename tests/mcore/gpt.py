"""A small GPT: its samples, its model and its loss."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_decoder_layer_specs,
    get_gpt_mtp_block_spec,
)

from .case import SEQUENCE_LENGTH, VOCABULARY


def sample(index: int) -> dict[str, torch.Tensor]:
    """A noisy arithmetic sequence of tokens, some of it masked."""
    tokens = sequence(index, SEQUENCE_LENGTH + 1)
    mask = torch.ones(SEQUENCE_LENGTH)
    mask[: index % 5] = 0.0  # Microbatches differ in their number of tokens.
    return {
        "tokens": tokens[:-1],
        "labels": tokens[1:],
        "loss_mask": mask,
        "positions": torch.arange(SEQUENCE_LENGTH),
    }


def sequence(index: int, length: int, vocabulary: int = VOCABULARY) -> torch.Tensor:
    """``length`` tokens that are a function of ``index``."""
    generator = torch.Generator().manual_seed(index)
    start, stride = torch.randint(1, vocabulary, (2,), generator=generator).tolist()
    noise = torch.randint(0, 2, (length,), generator=generator)
    return (start + (1 + stride % 3) * torch.arange(length) + noise) % vocabulary


def build(args: Any, config: Any, **keywords: Any) -> GPTModel:
    """One stage."""
    has_engine = args.transformer_impl == "transformer_engine"
    chunk = keywords.get("vp_stage")
    spec = get_gpt_decoder_block_spec(
        config, use_transformer_engine=has_engine, normalization=args.normalization, vp_stage=chunk
    )
    of_mtp = None
    if args.mtp_num_layers:
        # On a stage without others, of the kind that the last layer is of.
        layer = spec if spec.layer_specs else get_gpt_decoder_layer_specs(config, has_engine, args.normalization)[-1]
        of_mtp = get_gpt_mtp_block_spec(config, layer, use_transformer_engine=has_engine, vp_stage=chunk)
    return GPTModel(config=config, transformer_layer_spec=spec, mtp_block_spec=of_mtp, **keywords)


def reads_data() -> bool:
    """Whether this stage does."""
    return parallel_state.is_pipeline_first_stage() or parallel_state.is_pipeline_last_stage()


def run(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Losses per token on the last stage, activations elsewhere."""
    return model(batch.get("tokens"), batch.get("positions"), None, labels=batch.get("labels"))


def summed_loss(losses: torch.Tensor, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum of the losses that count and their number, as in Megatron's pretrain_gpt.py."""
    mask = batch["loss_mask"]
    return torch.sum(losses.view(-1).float() * mask.view(-1)), mask.sum().to(torch.int)
