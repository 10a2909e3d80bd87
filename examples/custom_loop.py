"""A training loop of one's own on Megatron-Core, under 2bw, 1f1b-flush, gpipe or inter-layer.

    torchrun --nproc-per-node 2 examples/custom_loop.py --schedule 2bw --batches 20

Trains a GPT that reads bytes, on the sources of Python's standard library. ``--schedule megatron`` runs the same loop
with Megatron-Core's own schedule. What differs is in `train`, marked there.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import megatron_2bw

megatron_2bw.install()  # Before Megatron is imported.

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig

SEQUENCE, MICRO_BATCH, MICROBATCHES = 64, 4, 4
VOCABULARY = 256
MAX_LR, MIN_LR = 3e-3, 3e-4
SEED = 1234


def build_model(stages: int) -> DistributedDataParallel:
    """This rank's stage of a small GPT."""
    config = TransformerConfig(
        num_layers=4,
        hidden_size=64,
        num_attention_heads=4,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        pipeline_model_parallel_size=stages,
        pipeline_dtype=torch.float32,
    )
    config.finalize_model_grads_func = finalize_model_grads
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(),
        vocab_size=VOCABULARY,
        max_sequence_length=SEQUENCE,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=True,
    )
    return DistributedDataParallel(config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), model.cuda())


def build_optimizer(model: DistributedDataParallel, batches: int) -> tuple[Any, OptimizerParamScheduler]:
    """Adam with clipping, and a learning rate that warms up and decays."""
    optimizer = get_megatron_optimizer(
        OptimizerConfig(optimizer="adam", lr=MAX_LR, min_lr=MIN_LR, clip_grad=1.0), [model]
    )
    samples = samples_per_batch()
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=MAX_LR,
        min_lr=MIN_LR,
        lr_warmup_steps=batches // 10 * samples,
        lr_decay_steps=batches * samples,
        lr_decay_style="cosine",
        start_wd=0.01,
        end_wd=0.01,
        wd_incr_steps=batches * samples,
        wd_incr_style="constant",
    )
    return optimizer, scheduler


def samples_per_batch() -> int:
    """Over all replicas."""
    return MICRO_BATCH * MICROBATCHES * parallel_state.get_data_parallel_world_size()


def microbatches() -> Iterator[torch.Tensor]:
    """Windows of text, the same on all stages of a pipeline and others on every replica; tokens are bytes."""
    sources = sorted(Path(os.__file__).parent.glob("*.py"))
    text = torch.frombuffer(bytearray(b"".join(source.read_bytes() for source in sources)), dtype=torch.uint8).long()
    generator = torch.Generator().manual_seed(SEED + parallel_state.get_data_parallel_rank())
    device = torch.cuda.current_device()
    while True:
        starts = torch.randint(len(text) - SEQUENCE - 1, (MICRO_BATCH,), generator=generator).tolist()
        yield torch.stack([text[start : start + SEQUENCE + 1] for start in starts]).to(device)


def forward_step(data: Iterator[torch.Tensor], model: torch.nn.Module) -> tuple[torch.Tensor, Any]:
    """Megatron-Core's interface: the stage's output, and what makes a loss of the last one's."""
    tokens = next(data)
    inputs, labels = tokens[:, :-1], tokens[:, 1:].contiguous()
    positions = torch.arange(SEQUENCE, device=tokens.device).expand_as(inputs)
    return model(inputs, positions, None, labels=labels), mean_loss


def mean_loss(losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Of one microbatch."""
    loss = losses.float().mean()
    return loss, {"loss": loss.detach().clone()}  # Megatron-Core divides the loss itself by the number of microbatches.


def train(schedule: str, batches: int) -> list[float]:
    """Train; returns the mean loss of every batch, on the last stage."""
    model = build_model(parallel_state.get_pipeline_model_parallel_world_size())
    optimizer, scheduler = build_optimizer(model, batches)
    pipeline = None
    run_batch = get_forward_backward_func()
    if schedule != "megatron":
        # The pipeline wraps optimizer and scheduler, runs batches, and is told how many are left.
        pipeline = megatron_2bw.Pipeline(schedule, model, optimizer)
        optimizer, scheduler = pipeline.optimizer, pipeline.drive(scheduler)
    data = microbatches()
    means = []
    for batch in range(batches):
        if pipeline is not None:
            run_batch = partial(pipeline.forward_backward, left=batches - 1 - batch)
        model.zero_grad_buffer()
        optimizer.zero_grad()
        losses = run_batch(
            forward_step_func=forward_step,
            data_iterator=data,
            model=model,
            num_microbatches=MICROBATCHES,
            seq_length=SEQUENCE,
            micro_batch_size=MICRO_BATCH,
            forward_only=False,
        )
        updated, _, _ = optimizer.step()
        if updated:
            scheduler.step(samples_per_batch())
        means += [float(torch.stack([loss["loss"] for loss in losses]).mean())] if losses else []
    if pipeline is not None:
        pipeline.close()  # Nothing is pending: the model holds the newest weights.
    return means


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedule", default="2bw")
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--batches", type=int, default=40)
    parser.add_argument("--losses", type=Path, help="write the loss of every batch there")
    options = parser.parse_args()
    has_gpu = torch.cuda.is_available()
    if has_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    else:
        torch.set_num_threads(1)
    dist.init_process_group("nccl" if has_gpu else "gloo")
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=options.stages)
    model_parallel_cuda_manual_seed(SEED)
    losses = train(options.schedule, options.batches)
    if losses and parallel_state.get_data_parallel_rank() == 0:
        print(f"{options.schedule}: loss {losses[0]:.4f} -> {losses[-1]:.4f} in {options.batches} batches", flush=True)
        if options.losses is not None:
            options.losses.write_text(json.dumps(losses))
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
