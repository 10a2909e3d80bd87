"""A small model and its data, the same for every layout: weights by name, samples by index."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.datasets.utils import Split
from megatron.training import get_args
from megatron.training.arguments import core_transformer_config_from_args

from . import bert, gpt, hybrid
from .shards import Shard, part_of, whole_shape

KINDS = {"gpt": gpt, "bert": bert, "hybrid": hybrid}
VALIDATION_OFFSET = 1_000_000
TIED_WEIGHT = "embedding.word_embeddings.weight"


class Samples(torch.utils.data.Dataset):
    """Sample i is a function of i."""

    def __init__(self, kind: str, count: int, split: Split, offset: int = 0) -> None:
        self.split = split
        self._kind = kind
        self._count = count
        self._offset = offset

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return KINDS[self._kind].sample(index + self._offset)


def training_samples(kind: str, count: int) -> Samples:
    """The first ``count`` training samples."""
    return Samples(kind, count, Split.train)


def validation_samples(kind: str, count: int) -> Samples:
    """The first ``count`` validation samples; no training sample is among them."""
    return Samples(kind, count, Split.valid, VALIDATION_OFFSET)


def datasets(kind: str) -> Any:
    """Megatron's dataset provider: training, validation and no test set."""

    def provide(counts: list[int]) -> tuple[Samples, Samples | None, None]:
        return training_samples(kind, counts[0]), validation_samples(kind, counts[1]) if counts[1] else None, None

    provide.is_distributed = True
    return provide


def build_model(
    kind: str, pre_process: bool = True, post_process: bool = True, pg_collection: Any = None, **_: Any
) -> Any:
    """Megatron's model provider: one stage with weights that depend on their global names only."""
    args = get_args()
    model = KINDS[kind].build(
        args,
        core_transformer_config_from_args(args),
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        pg_collection=pg_collection,
    )
    load_initial(model)
    return model


def load_initial(model: Any) -> None:
    """Give a model, or a stage of it, its initial weights; tensor-parallel ranks take parts of the same tensors."""
    with torch.no_grad():
        for shard, parameter in shards(model):
            ranks = _tensor_ranks(shard.name)
            parameter.copy_(part_of(_initial(shard.name, whole_shape(shard, ranks)), shard, ranks))


def _initial(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    noise = 0.05 * torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))
    return 1.0 + noise if name.endswith("norm.weight") else noise


def global_parameters(model: Any) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Parameters with the names they have in an undivided model; a second copy of the tied weight too.

    With multi-token prediction that copy is the last stage's embedding, and nothing uses its output weight.
    """
    tied = model.share_embeddings_and_output_weights or getattr(model, "output_layer_is_tied_copy", False)
    tied = tied and not getattr(model, "mtp_process", False)
    for name, parameter in model.named_parameters():
        if (name == "output_layer.weight" and tied) or name.startswith("embedding_of_mtp."):
            name = TIED_WEIGHT
        if name.startswith(("decoder.layers.", "encoder.layers.")):
            block, layers, local, rest = name.split(".", 3)
            number = getattr(model, block).layers[int(local)].layer_number - 1
            name = f"{block}.{layers}.{number}.{rest}"
        yield _of_expert(name, model), parameter


def _of_expert(name: str, model: Any) -> str:
    """Count experts from the first rank's."""
    before, found, after = name.partition("local_experts.")
    if not found:
        return name
    local, _, rest = after.partition(".")
    count = model.config.num_moe_experts // parallel_state.get_expert_model_parallel_world_size()
    number = parallel_state.get_expert_model_parallel_rank() * count + int(local)
    return f"{before}{found}{number}.{rest}"


def is_of_expert(name: str) -> bool:
    """Whether ranks split the weight ``name`` as they split experts."""
    return ".local_experts." in name


def _tensor_ranks(name: str) -> int:
    """So many ranks split the weight ``name``, if any do."""
    if is_of_expert(name):
        return parallel_state.get_expert_tensor_parallel_world_size()
    return parallel_state.get_tensor_model_parallel_world_size()


def shards(model: Any) -> Iterator[tuple[Shard, torch.nn.Parameter]]:
    """Parameters with what they are of the undivided model."""
    for name, parameter in global_parameters(model):
        divided = getattr(parameter, "tensor_model_parallel", False) and _tensor_ranks(name) > 1
        yield (
            Shard(
                name=name,
                shape=tuple(parameter.shape),
                dim=parameter.partition_dim if divided else -1,
                stride=parameter.partition_stride if divided else 1,
                tensor_rank=parallel_state.get_expert_tensor_parallel_rank()
                if divided and is_of_expert(name)
                else parallel_state.get_tensor_model_parallel_rank(),
            ),
            parameter,
        )


def forward_step(
    kind: str, data_iterator: Any, model: Any, recorded_losses: list[torch.Tensor], recorded_seeds: list[torch.Tensor]
) -> tuple[Any, Any]:
    """Megatron's forward step; losses, and the gradients that backward starts with, are recorded on the way."""
    batch = on_this_rank(next(data_iterator)) if KINDS[kind].reads_data() else {}
    return KINDS[kind].run(model, batch), partial(_loss, kind, batch, recorded_losses, recorded_seeds)


def on_this_rank(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What this rank has of the sequences in ``batch``, where the model is."""
    ranks, rank = parallel_state.get_context_parallel_world_size(), parallel_state.get_context_parallel_rank()
    there = {name: value.cuda() for name, value in batch.items()}
    return there if ranks == 1 else {name: of_rank(value, rank, ranks, dim=1) for name, value in there.items()}


def of_rank(sequence: torch.Tensor, rank: int, ranks: int, dim: int) -> torch.Tensor:
    """What one of n context-parallel ranks has of a sequence.

    Two of 2n pieces, one from either end: as much of causal attention's work as the others.
    """
    pieces = sequence.chunk(2 * ranks, dim)
    return torch.cat([pieces[rank], pieces[-1 - rank]], dim)


def record_seed(total: torch.Tensor, recorded: list[torch.Tensor]) -> None:
    """Keep the gradient of the summed loss: loss scale over tokens over microbatches."""
    if total.requires_grad:
        total.register_hook(recorded.append)


def _loss(
    kind: str, batch: dict[str, torch.Tensor], losses: list[torch.Tensor], seeds: list[torch.Tensor], output: Any
) -> tuple[torch.Tensor, ...]:
    total, num_tokens = KINDS[kind].summed_loss(output, batch)
    losses.append((total / num_tokens).detach())
    record_seed(total, seeds)
    return total, num_tokens, {"lm loss": torch.stack([total.detach(), num_tokens.float()])}
