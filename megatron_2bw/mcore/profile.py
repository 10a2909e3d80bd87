"""Times the parts of a model on every rank of this machine at once: ``python -m megatron_2bw.mcore.profile``.

``megatron-2bw profile`` starts it, once per tensor-parallel size. A stage of a few layers is built three times by
Megatron: as it is, with the embedding, and with the output layer; the differences are theirs.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Callable, Iterable
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from megatron_2bw import install

install()  # Before Megatron is imported.

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.utils import get_attr_wrapped_model
from megatron.training import get_args, training
from megatron.training.arguments import core_transformer_config_from_args, parse_and_validate_args

from megatron_2bw.mcore.loop.automatic import memory_bytes
from megatron_2bw.mcore.timing import Took, processors, repeated, timed
from megatron_2bw.planner.measure.profile import DONE, LAYERS, AllReduce, Block, Pass, Profile, Update
from megatron_2bw.planner.specs.layout import Recompute

SMALL_BYTES = 2**10
LARGE_BYTES, LARGE_BYTES_ON_GPUS = 2**24, 2**30
"""Of the sums that measure links; 256 MiB are too little for all that NVLink can do (NVIDIA/nccl-tests, issue 212)."""


class _DoesNotFitError(RuntimeError):
    """On some rank there is too little memory."""


class Ends(NamedTuple):
    """What a stage has beside layers."""

    embedding: bool = False
    output: bool = False


def main() -> None:
    """Measure what the profile lacks for the tensor-parallel size in Megatron's flags; rank 0 writes it."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--profile", type=Path, required=True)
    parser.add_argument("--microbatches", type=_numbers, required=True)
    parser.add_argument("--recomputes", type=_choices, required=True)
    options, sys.argv[1:] = parser.parse_known_args()
    args = parse_and_validate_args()
    training.initialize_megatron()
    profile = _identified(Profile.load(options.profile), options.profile)
    if profile.setting.fused_attention and args.transformer_impl == "local":
        raise SystemExit("megatron-2bw: error: Megatron has no fused attention here; use --attention-backend unfused")
    Measurement(profile, options.profile).run(args, options.microbatches, options.recomputes)
    dist.destroy_process_group()


def _identified(profile: Profile, path: Path) -> Profile:
    """With the machine and the versions it is of.

    Raises:
        SystemExit: it is of others.
    """
    device, memory_gb, shared, has_bf16 = _device()
    names = ("torch", "megatron-core", "transformer-engine", "apex")
    versions = ", ".join(f"{name} {version}" for name in names if (version := _version(name)))
    if profile.device and (profile.device, profile.versions) != (device, versions):
        raise SystemExit(
            f"megatron-2bw: error: {path} was measured on {profile.device} with {profile.versions}, this is {device} "
            f"with {versions}: give another --output"
        )
    profile.device, profile.memory_gb, profile.processors, profile.versions = device, memory_gb, shared, versions
    profile.has_bf16 = has_bf16
    return profile


def _device() -> tuple[str, float, int, bool]:
    """Name, GiB of memory for each rank, processors that ranks share, and whether it computes in bf16."""
    has_gpu = torch.cuda.is_available()
    name = torch.cuda.get_device_name() if has_gpu else f"CPU ({processors()} cores)"
    has_bf16 = not has_gpu or torch.cuda.get_device_capability() >= (8, 0)
    return name, round(memory_bytes() / 2**30, 1), processors(), has_bf16


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


class Measurement:
    """All ranks measure, rank 0 keeps.

    Args:
        profile: what is known.
        path: its file.
    """

    def __init__(self, profile: Profile, path: Path) -> None:
        self._profile = profile
        self._path = path

    def run(self, args: Any, microbatches: Iterable[int], recomputes: Iterable[Recompute]) -> None:
        """The update, every microbatch size with every kind of recomputation, and the links."""
        profile, tensor = self._profile, args.tensor_model_parallel_size
        if profile.update(tensor) is None:
            self._update(tensor)
        if profile.update(tensor) is not None:
            self._blocks(args, microbatches, recomputes)
        if not profile.has_links:
            large_bytes = LARGE_BYTES_ON_GPUS if torch.cuda.is_available() else LARGE_BYTES
            profile.all_reduces = [_all_reduce(size_bytes) for size_bytes in (SMALL_BYTES, large_bytes)]
            self._keep(f"{_milliseconds(profile.all_reduces[-1].time_s)} per sum of {large_bytes >> 20} MiB")

    def _update(self, tensor: int) -> None:
        """Leaves it out where it does not fit into memory."""
        try:
            update = _update(tensor)
        except _DoesNotFitError:
            # Nor is anything else of use that was measured with it before.
            self._profile.blocks = [block for block in self._profile.blocks if block.tensor != tensor]
            self._keep(f"tensor {tensor}: {LAYERS} layers with gradients and optimizer are out of memory, left out")
            return
        self._profile.updates.append(update)
        self._keep(f"{_milliseconds(update.time_s)} per update, tensor {tensor}")

    def _blocks(self, args: Any, microbatches: Iterable[int], recomputes: Iterable[Recompute]) -> None:
        profile, tensor = self._profile, args.tensor_model_parallel_size
        for microbatch in microbatches:
            for recompute in recomputes:
                if profile.block(tensor, microbatch, recompute) is None:
                    block = self._block(args, microbatch, recompute)
                    if block is None:
                        break  # Other kinds of recomputation are compared with none.
                    profile.blocks.append(block)
                    self._keep(f"{_milliseconds(*block.layer)} per layer, t = {tensor}, b = {microbatch}, {recompute}")

    def _block(self, args: Any, microbatch: int, recompute: Recompute) -> Block | None:
        """None where it does not fit into memory."""
        set_recompute(args, recompute)
        try:
            layers, kept_bytes = _stage_times(Ends(), microbatch)
            embedding = output = layers
            if recompute is Recompute.NONE:
                embedding, _ = _stage_times(Ends(embedding=True), microbatch)
                output, _ = _stage_times(Ends(output=True), microbatch)
        except _DoesNotFitError:
            _say(f"tensor {args.tensor_model_parallel_size}, b = {microbatch}, {recompute}: out of memory, left out")
            return None
        return Block(
            tensor=args.tensor_model_parallel_size,
            microbatch=microbatch,
            recompute=recompute,
            layer_forward_s=layers.forward_s / LAYERS,
            layer_backward_s=layers.backward_s / LAYERS,
            layer_kept_bytes=kept_bytes // LAYERS,
            embedding_forward_s=max(0.0, embedding.forward_s - layers.forward_s),
            embedding_backward_s=max(0.0, embedding.backward_s - layers.backward_s),
            loss_forward_s=max(0.0, output.forward_s - layers.forward_s),
            loss_backward_s=max(0.0, output.backward_s - layers.backward_s),
        )

    def _keep(self, what: str) -> None:
        if dist.get_rank() == 0:
            self._profile.save(self._path)
        _say(what)


def set_recompute(args: Any, recompute: Recompute) -> None:
    """Set Megatron's arguments for the next model."""
    args.recompute_granularity = None if recompute is Recompute.NONE else str(recompute)
    args.recompute_method = "uniform" if recompute is Recompute.FULL else None
    args.recompute_num_layers = 1 if recompute is Recompute.FULL else None


def _build(ends: Ends) -> torch.nn.Module:
    """A stage in Megatron's wrappers, which sum gradients into buffers."""
    args = get_args()
    gc.collect()  # The stage before, whose hooks refer to it.
    torch.cuda.empty_cache()

    def provide(*_: Any, **__: Any) -> GPTModel:
        config = core_transformer_config_from_args(args)
        layers = get_gpt_decoder_block_spec(
            config,
            use_transformer_engine=args.transformer_impl == "transformer_engine",
            normalization=args.normalization,
        )
        return GPTModel(
            config=config,
            transformer_layer_spec=layers,
            vocab_size=args.padded_vocab_size,
            max_sequence_length=args.max_position_embeddings,
            pre_process=ends.embedding,
            post_process=ends.output,
            share_embeddings_and_output_weights=False,  # There is one end at most.
            position_embedding_type=args.position_embedding_type,
            rotary_percent=args.rotary_percent,
            rotary_base=args.rotary_base,
        )

    (model,) = training.get_model(provide, wrap_with_ddp=True)
    return model


def _stage_times(ends: Ends, microbatch: int) -> tuple[Pass, int]:
    """Of one microbatch, and the bytes that its forward leaves for the backward.

    Raises:
        _DoesNotFitError: on all ranks, if it does not fit on one of them.
    """
    args = get_args()

    def prepared() -> tuple[torch.nn.Module, torch.Tensor, torch.Tensor | None]:
        model = _build(ends)
        device = next(model.parameters()).device
        tokens = torch.randint(args.vocab_size, (microbatch, args.seq_length), device=device)
        length = args.seq_length // (args.tensor_model_parallel_size if args.sequence_parallel else 1)
        shape, dtype = (length, microbatch, args.hidden_size), args.params_dtype
        received = None if ends.embedding else torch.randn(shape, dtype=dtype, device=device, requires_grad=True)
        return model, tokens, received

    model, tokens, received = _together(prepared)
    positions = torch.arange(args.seq_length, device=tokens.device).expand_as(tokens)
    labels = tokens if ends.output else None
    # Megatron's wrapper for 16 bits turns what a last stage returns into fp32, which only the loss needs.
    more = {"fp32_output": ends.output} if args.fp16 or args.bf16 else {}

    def forward() -> torch.Tensor:
        if received is not None:
            received.grad = None
            get_attr_wrapped_model(model, "set_input_tensor")(received)
        output = model(tokens, positions, None, labels=labels, **more)
        return output.sum() if ends.output else output

    def once() -> tuple[Took, Took]:
        forward_took, output = timed(forward)
        gradient = torch.ones_like(output)
        backward_took, _ = timed(lambda: output.backward(gradient))
        return forward_took, backward_took

    kept_bytes, _ = _together(lambda: (_kept_bytes(forward, model), once()))
    return Pass(*repeated(once, waits=_all_wait())), kept_bytes


def _together[Result](run: Callable[[], Result]) -> Result:
    """What ``run`` returns, if it fits into the memory of all ranks.

    Where only some tensor-parallel ranks run out of it, the others may wait inside for these, until Megatron's timeout.
    """
    failed = torch.zeros(1, device=torch.cuda.current_device())
    try:
        result = run()
    except torch.OutOfMemoryError:
        failed += 1
    dist.all_reduce(failed)
    if failed:
        raise _DoesNotFitError
    return result


def _kept_bytes(forward: Callable[[], torch.Tensor], model: torch.nn.Module) -> int:
    """Of all storages that autograd keeps, without the weights."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        forward()
    return sum(kept.values())


def _update(tensor: int) -> Update:
    """Megatron's own step, with gradients of zero: it takes as long as any other.

    Raises:
        _DoesNotFitError: on all ranks, if it does not fit on one of them.
    """
    set_recompute(get_args(), Recompute.NONE)
    config, overrides = training.get_megatron_optimizer_config(get_args())

    def prepared() -> tuple[torch.nn.Module, Callable[[], tuple[Took]]]:
        model = _build(Ends())
        optimizer = get_megatron_optimizer(config, [model], config_overrides=overrides)

        def once() -> tuple[Took]:
            return timed(lambda: (optimizer.step(), model.zero_grad_buffer(), optimizer.zero_grad()))[:1]

        once()  # It makes its state.
        return model, once

    model, once = _together(prepared)
    weights = sum(parameter.numel() for parameter in model.parameters())
    (time_s,) = repeated(once, waits=_all_wait())
    return Update(tensor=tensor, weights=weights, time_s=time_s)


def _all_reduce(size_bytes: int) -> AllReduce:
    numbers = torch.zeros(size_bytes // 4, device=torch.cuda.current_device())
    (time_s,) = repeated(lambda: timed(lambda: dist.all_reduce(numbers))[:1], waits=True)
    return AllReduce(ranks=dist.get_world_size(), size_bytes=size_bytes, time_s=time_s)


def _all_wait() -> bool:
    """Whether all ranks are tensor-parallel ones of each other."""
    return get_args().tensor_model_parallel_size == dist.get_world_size()


def _say(what: str) -> None:
    """To the command that started this, which shows how far it is."""
    if dist.get_rank() == 0:
        print(f"{DONE}{what}", flush=True)


def _milliseconds(*times_s: float) -> str:
    return " + ".join(f"{1000 * time_s:.2f}" for time_s in times_s) + " ms"


def _numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def _choices(text: str) -> list[Recompute]:
    return [Recompute(word) for word in text.split(",")]


if __name__ == "__main__":
    main()
