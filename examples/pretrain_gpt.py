"""Pretrain a GPT on Megatron-Core, with any pipeline schedule of megatron_2bw.

Both start it:

    torchrun --nproc-per-node 2 examples/pretrain_gpt.py --pipeline-schedule 2bw ...
    torchrun --nproc-per-node 2 -m megatron_2bw examples/pretrain_gpt.py --pipeline-schedule 2bw ...

All other flags are Megatron's. Data: ``--data-path PREFIX --tokenizer-model FILE``, or ``--mock-data``.
Layers are Megatron-Core's own (``--transformer-impl local``) or Transformer Engine's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import megatron_2bw

megatron_2bw.install()  # Before Megatron is imported.

import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_decoder_layer_specs,
    get_gpt_mtp_block_spec,
)
from megatron.core.parallel_state import get_context_parallel_group
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.core.utils import get_attr_wrapped_model, get_batch_on_this_cp_rank
from megatron.training import get_args, get_timers, pretrain
from megatron.training.argument_utils import pretrain_cfg_container_from_args
from megatron.training.arguments import core_transformer_config_from_args, parse_and_validate_args
from megatron.training.utils import get_blend_and_blend_per_split, is_first_or_last_pipeline_stage

Batch = dict[str, torch.Tensor]
NOT_READ = (
    *("spec", "experimental_attention_variant", "heterogeneous_layers_config_path"),
    *("heterogeneous_layers_config_encoded_json", "yaml_cfg", "sft", "fim_data", "dataloader_inter_document_masking"),
    *("hybrid_context_parallel", "per_dataset_sequences_path", "multiple_validation_sets", "full_validation"),
    *("logits_load_dir", "check_for_spiky_loss", "overlap_moe_expert_parallel_comm"),
)
"""Flags that change what Megatron-LM's own script trains, or how it looks at that; this one would do without a word."""


def build_model(
    pre_process: bool = True,
    post_process: bool = True,
    vp_stage: int | None = None,
    config: Any = None,
    pg_collection: Any = None,
) -> GPTModel:
    """The layers of this rank's stage, with the embedding on the first and the output layer on the last."""
    args = get_args()
    config = config or core_transformer_config_from_args(args)
    kind = {
        "use_transformer_engine": args.transformer_impl == "transformer_engine",
        "normalization": args.normalization,
        "qk_l2_norm": args.qk_l2_norm,
    }
    mtp = None
    if args.mtp_num_layers:
        last_layer = get_gpt_decoder_layer_specs(config, **kind)[-1]
        mtp = get_gpt_mtp_block_spec(config, last_layer, kind["use_transformer_engine"], vp_stage=vp_stage)
    return GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_decoder_block_spec(config, **kind, vp_stage=vp_stage),
        mtp_block_spec=mtp,
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        fp16_lm_cross_entropy=args.fp16_lm_cross_entropy,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
        rotary_base=args.rotary_base,
        rope_scaling=args.use_rope_scaling,
        vp_stage=vp_stage,
        pg_collection=pg_collection,
    )


def build_datasets(samples: list[int], vp_stage: int | None = None) -> tuple[Any, Any, Any]:
    """Training, validation and test sets of at least ``samples`` samples, on first and last stages only."""
    args = get_args()
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        path_to_cache=args.data_cache_path,
        mmap_bin_files=args.mmap_bin_files,
        num_dataset_builder_threads=args.num_dataset_builder_threads,
        tokenizer=build_tokenizer(args),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=args.create_attention_mask_in_dataloader,
    )
    dataset = MockGPTDataset if args.mock_data else GPTDataset
    needs_data = partial(is_first_or_last_pipeline_stage, vp_stage)
    return BlendedMegatronDatasetBuilder(dataset, samples, needs_data, config).build()


# Every rank of a tensor-parallel group reads its own copy of the same samples, so none is broadcast.
build_datasets.is_distributed = True


def read_batch(data_iterator: Iterator[Batch] | None, model: torch.nn.Module) -> Batch:
    """This rank's part of the next microbatch, each value (sequences, tokens / context-parallel ranks).

    Empty on a stage between first and last.
    """
    if not (get_attr_wrapped_model(model, "pre_process") or get_attr_wrapped_model(model, "post_process")):
        return {}
    batch = next(data_iterator)
    there = {name: value.cuda(non_blocking=True) for name, value in batch.items() if torch.is_tensor(value)}
    return get_batch_on_this_cp_rank(there, is_hybrid_cp=False, cp_group=get_context_parallel_group())


def masked_loss(loss_mask: torch.Tensor, losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Batch]:
    """Sum of the per-token losses, the number of tokens, and both together for the log."""
    loss_mask = loss_mask.reshape(-1).float()
    loss = torch.sum(losses.reshape(-1).float() * loss_mask)
    tokens = loss_mask.sum().to(torch.int)
    if get_args().check_for_nan_in_loss_and_grad:
        get_rerun_state_machine().validate_result(
            result=loss, rejection_func=lambda value: not torch.isfinite(value), message="the loss is not finite"
        )
    return loss, tokens, {"lm loss": torch.stack([loss.detach(), tokens])}


def forward_step(data_iterator: Iterator[Batch] | None, model: torch.nn.Module) -> tuple[torch.Tensor, Callable]:
    """One microbatch through this stage; returns its output and the function that turns it into the loss."""
    timer = get_timers()("batch-generator", log_level=2)
    timer.start()
    batch = read_batch(data_iterator, model)
    timer.stop()
    output = model(
        batch.get("tokens"),
        batch.get("position_ids"),
        batch.get("attention_mask"),
        labels=batch.get("labels"),
        loss_mask=batch.get("loss_mask"),
    )
    return output, partial(masked_loss, batch.get("loss_mask"))


def main() -> None:
    args = parse_and_validate_args(args_defaults={"tokenizer_type": "GPTSentencePieceTokenizer"})
    for name in NOT_READ:
        if getattr(args, name, None):
            raise ValueError(
                f"--{name.replace('_', '-')}: this example does not read it; leave it out, or start Megatron-LM's own "
                "pretrain_gpt.py"
            )
    pretrain(
        pretrain_cfg_container_from_args(args),
        build_datasets,
        model_type=ModelType.encoder_or_decoder,
        forward_step_func=forward_step,
        model_provider=build_model,
    )


if __name__ == "__main__":
    main()
