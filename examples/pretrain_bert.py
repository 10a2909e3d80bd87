"""Pretrain a BERT on Megatron-Core, with any pipeline schedule of megatron_2bw.

    torchrun --nproc-per-node 2 examples/pretrain_bert.py --pipeline-schedule 2bw ...
    torchrun --nproc-per-node 2 -m megatron_2bw examples/pretrain_bert.py --pipeline-schedule 2bw ...

Masked language model, and whether two passages follow each other (``--bert-no-binary-head`` leaves that out).
All other flags are Megatron's. Data: ``--data-path PREFIX`` of sentences, with a SentencePiece vocabulary of
``examples/prepare_data.py --model bert`` (``--tokenizer-model FILE``) or WordPiece (``--tokenizer-type
BertWordPieceLowerCase --vocab-file FILE``, which needs the package transformers).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import megatron_2bw

megatron_2bw.install()  # Before Megatron is imported.

import torch
from megatron.core.datasets.bert_dataset import BERTMaskedWordPieceDataset, BERTMaskedWordPieceDatasetConfig
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.enums import ModelType
from megatron.core.models.bert.bert_layer_specs import (
    bert_layer_local_spec,
    get_bert_layer_with_transformer_engine_spec,
)
from megatron.core.models.bert.bert_model import BertModel
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.training import get_args, get_timers, pretrain
from megatron.training.argument_utils import pretrain_cfg_container_from_args
from megatron.training.arguments import core_transformer_config_from_args, parse_and_validate_args
from megatron.training.utils import get_blend_and_blend_per_split

Batch = dict[str, torch.Tensor]
NOT_READ = (
    *("spec", "num_experts", "multi_latent_attention", "mtp_num_layers", "use_rope_scaling", "yaml_cfg"),
    *("heterogeneous_layers_config_path", "heterogeneous_layers_config_encoded_json", "experimental_attention_variant"),
    *("sft", "fim_data"),
)
"""Flags of other models and data, which Megatron-Core's BERT would do without and not say so."""


class BertVocabulary:
    """What Megatron's dataset asks a BERT tokenizer, for a SentencePiece model that holds BERT's special tokens.

    Args:
        tokenizer: Megatron's.

    Raises:
        ValueError: a special token is missing, or the padding is not token 0, which the dataset counts on.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.unique_identifiers: OrderedDict[str, str] = tokenizer.unique_identifiers
        """For the dataset's cache."""
        ids = {piece: id_ for id_, piece in tokenizer.inv_vocab.items()}
        names = ("[PAD]", "[CLS]", "[SEP]", "[MASK]")
        if ids.get("[PAD]") != 0 or not all(name in ids for name in names):
            raise ValueError(
                "--tokenizer-model holds no vocabulary for BERT: [PAD] has to be token 0, and [CLS], [SEP] and [MASK] "
                "have to be there; examples/prepare_data.py --model bert makes one"
            )
        self.pad, self.cls, self.sep, self.mask = (ids[name] for name in names)
        self.inv_vocab = {id_: piece if begins_word(piece) else f"##{piece}" for piece, id_ in ids.items()}
        """Pieces by id, those that go on with a word marked as WordPiece marks them: whole words are masked."""


def begins_word(piece: str) -> bool:
    """Whether a SentencePiece piece does; special tokens stand alone."""
    return piece.startswith(("\u2581", "["))


def build_model(
    pre_process: bool = True,
    post_process: bool = True,
    vp_stage: int | None = None,
    config: Any = None,
    pg_collection: Any = None,
) -> BertModel:
    """The layers of this rank's stage, with the embedding on the first and both heads on the last."""
    args = get_args()
    has_engine = args.transformer_impl == "transformer_engine"
    return BertModel(
        config=config or core_transformer_config_from_args(args),
        num_tokentypes=2 if args.bert_binary_head else 0,
        transformer_layer_spec=get_bert_layer_with_transformer_engine_spec() if has_engine else bert_layer_local_spec,
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        fp16_lm_cross_entropy=args.fp16_lm_cross_entropy,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
        add_binary_head=args.bert_binary_head,
        vp_stage=vp_stage,
        pg_collection=pg_collection,
    )


def build_datasets(samples: list[int], vp_stage: int | None = None) -> tuple[Any, Any, Any]:
    """Training, validation and test sets of at least ``samples`` samples; every stage masks out the padding."""
    args = get_args()
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    tokenizer = build_tokenizer(args)
    config = BERTMaskedWordPieceDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        path_to_cache=args.data_cache_path,
        mmap_bin_files=args.mmap_bin_files,
        num_dataset_builder_threads=args.num_dataset_builder_threads,
        tokenizer=BertVocabulary(tokenizer) if "SentencePiece" in args.tokenizer_type else tokenizer,
        masking_probability=args.mask_prob,
        short_sequence_probability=args.short_seq_prob,
        masking_max_ngram=3,
        masking_do_full_word=True,
        masking_do_permutation=False,
        masking_use_longer_ngrams=False,
        masking_use_geometric_distribution=False,
        classification_head=args.bert_binary_head,
    )
    return BlendedMegatronDatasetBuilder(BERTMaskedWordPieceDataset, samples, lambda: True, config).build()


# Every rank reads its own copy of the same samples, so none is broadcast.
build_datasets.is_distributed = True


def read_batch(data_iterator: Iterator[Batch]) -> Batch:
    """The next microbatch: (sequences, tokens), and ``is_random`` per sequence."""
    return {name: value.cuda(non_blocking=True) for name, value in next(data_iterator).items()}


def masked_loss(
    batch: Batch, output: tuple[torch.Tensor, torch.Tensor | None]
) -> tuple[torch.Tensor, torch.Tensor, Batch]:
    """Sum of the losses per masked token, the number of these tokens, and what is logged.

    The loss of the order of two passages, a mean over sequences, counts for every masked token, so that a microbatch
    ends up with the sum of both means.
    """
    losses, order_logits = output
    mask = batch["loss_mask"].reshape(-1).float()
    masked_tokens = torch.sum(losses.reshape(-1).float() * mask)
    tokens = mask.sum().to(torch.int)
    logged = {"lm loss": torch.stack([masked_tokens.detach(), tokens])}
    loss = masked_tokens
    if order_logits is not None:
        order = torch.nn.functional.cross_entropy(order_logits.float(), batch["is_random"])
        loss = loss + order * tokens
        sequences = torch.full_like(order, batch["is_random"].numel(), requires_grad=False)
        logged["sop loss"] = torch.stack([order.detach() * sequences, sequences])
    if get_args().check_for_nan_in_loss_and_grad:
        get_rerun_state_machine().validate_result(
            result=loss, rejection_func=lambda value: not torch.isfinite(value), message="the loss is not finite"
        )
    return loss, tokens, logged


def forward_step(data_iterator: Iterator[Batch], model: torch.nn.Module) -> tuple[Any, Callable]:
    """One microbatch through this stage; returns its output and the function that turns it into the loss."""
    timer = get_timers()("batch-generator", log_level=2)
    timer.start()
    batch = read_batch(data_iterator)
    timer.stop()
    output = model(
        batch["text"],
        batch["padding_mask"],
        tokentype_ids=batch["types"] if get_args().bert_binary_head else None,
        lm_labels=batch["labels"],
    )
    return output, partial(masked_loss, batch)


def main() -> None:
    args = parse_and_validate_args(args_defaults={"tokenizer_type": "SentencePieceTokenizer"})
    if args.context_parallel_size > 1:
        raise ValueError(f"--context-parallel-size {args.context_parallel_size}: BERT needs whole sequences; use 1")
    for name in NOT_READ:
        if getattr(args, name, None):
            raise ValueError(f"--{name.replace('_', '-')}: BERT has no such thing here; leave it out")
    if args.mock_data:
        raise ValueError("--mock-data: there is none for BERT; give --data-path")
    pretrain(
        pretrain_cfg_container_from_args(args),
        build_datasets,
        model_type=ModelType.encoder_or_decoder,
        forward_step_func=forward_step,
        model_provider=build_model,
    )


if __name__ == "__main__":
    main()
