"""One rank of a training loop that is not Megatron's, around `megatron_2bw.Pipeline`."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import default_collate

from .case import MICRO_BATCH_SIZE, SEQUENCE_LENGTH, Case
from .worker import forward_step, initialize, provide, write


def main(case: Case, rank: int, port: int, folder: Path, then: str | None = None) -> None:
    """Run ``case`` as ``rank``; Megatron's flags only size the model and the optimizer.

    Args:
        then: the schedule of the second half of the batches; "megatron" is Megatron-Core's own function.
    """
    args = initialize(replace(case, schedule="megatron", synchronous=0, delayed=0), rank, case.ranks, port)
    from megatron.core import parallel_state
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.transformer.module import Float16Module
    from megatron.training import training

    import megatron_2bw

    from .record import RankRecord, record_updates

    record, models = RankRecord(), []
    optimizers = record_updates(case, record, models)

    def build() -> DistributedDataParallel:
        ends = parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage()
        bare = provide(case.kind, record, models, *ends)
        bare.config.finalize_model_grads_func = finalize_model_grads
        module = Float16Module(bare.config, bare) if case.precision != "fp32" else bare
        sums = DistributedDataParallelConfig(grad_reduce_in_fp32=args.accumulate_allreduce_grads_in_fp32)
        return DistributedDataParallel(bare.config, sums, module)

    model = build()
    config, overrides = training.get_megatron_optimizer_config(args)
    optimizer = training.get_megatron_optimizer(config, [model], config_overrides=overrides)
    scheduler = training.get_optimizer_param_scheduler(optimizer)
    mirrored = megatron_2bw.build_mirrored(build) if case.schedule == "chimera" else None
    data = _microbatches(case, parallel_state.get_data_parallel_rank())
    spans = [(case.schedule, range(case.batches))]
    if then is not None:
        half = case.batches // 2
        spans = [(case.schedule, range(half)), (then, range(half, case.batches))]
    for schedule, batches in spans:
        pipeline = None
        if case.precision == "fp16":  # As Megatron's loop does; in a second pipeline, of the one that is closed.
            model.config.grad_scale_func = optimizer.scale_loss
        if schedule != "megatron":
            pipeline = megatron_2bw.Pipeline(
                schedule, model, optimizer, mirrored=mirrored, delayed_microbatches=case.delayed or None
            )
            optimizer, scheduler = pipeline.optimizer, pipeline.drive(scheduler)
        for batch in batches:
            model.zero_grad_buffer()
            optimizer.zero_grad()
            run = get_forward_backward_func()
            if pipeline is not None:
                left = batches[-1] - batch
                run = partial(pipeline.forward_backward, left=left, synchronous=batch < case.synchronous)
            run(**_keywords(case, model, data, partial(forward_step, case.kind, record)))
            assert case.precision != "fp16" or model.config.grad_scale_func == optimizer.scale_loss
            optimizer.step()
            scheduler.step(case.global_batch_size)
        if pipeline is not None:
            pipeline.close()
    if case.precision != "fp32":
        record.main = optimizers.main_weights()
    write(record, models[0], folder / f"rank{rank}.pt")


def _keywords(case: Case, model: Any, data: Any, step: Any) -> dict[str, Any]:
    """Of a call for one batch."""
    return {
        "forward_step_func": step,
        "data_iterator": data,
        "model": model,
        "num_microbatches": case.microbatches,
        "seq_length": SEQUENCE_LENGTH,
        "micro_batch_size": MICRO_BATCH_SIZE,
    }


def _microbatches(case: Case, replica: int) -> Iterator[dict[str, torch.Tensor]]:
    from .model import training_samples

    samples = training_samples(case.kind, case.batches * case.global_batch_size)
    for first in range(replica * MICRO_BATCH_SIZE, len(samples), case.replicas * MICRO_BATCH_SIZE):
        yield default_collate([samples[first + i] for i in range(MICRO_BATCH_SIZE)])


def refused(case: Case, rank: int, port: int, folder: Path) -> None:
    """Write what `Pipeline` says of configs that the schedule does not work with."""
    initialize(replace(case, schedule="megatron", synchronous=0, delayed=0), rank, case.ranks, port)
    from megatron.core.timers import Timers

    import megatron_2bw
    from megatron_2bw.runtime.corrections import MomentLead, UpdateLead

    def answer(
        schedule: str,
        model: dict[str, Any],
        ddp: dict[str, Any],
        use: Any = None,
        **keywords: Any,
    ) -> str:
        wrapped, inner = _stage(case, model, ddp)
        try:
            pipeline = megatron_2bw.Pipeline(schedule, wrapped, inner, **keywords)
            use(pipeline)
            pipeline.forget()
        except (ValueError, RuntimeError, TypeError) as error:
            return str(error)
        return ""

    def reduced_otherwise(pipeline: megatron_2bw.Pipeline) -> None:
        pipeline.config.finalize_model_grads_func = print
        pipeline.forward_backward(**_keywords(case, pipeline._model, data=None, step=None))

    def scaled_otherwise(pipeline: megatron_2bw.Pipeline) -> None:
        pipeline.optimizer.scales.by_version = {0: torch.ones(1)}  # As in fp16.
        pipeline.config.grad_scale_func = pipeline.config.mtp_grad_scale_func = print
        pipeline.forward_backward(**_keywords(case, pipeline._model, data=None, step=None))

    mean_in_fp32 = {"reduce_scatter_with_fp32_accumulation": True, "average_in_collective": True}
    answers = {
        "overlap": answer("2bw", {}, {"overlap_grad_reduce": True}),
        "clipped attention": answer("2bw", {"qk_clip": True}, {}),
        "delayed weight gradients": answer("gpipe", {"delay_wgrad_compute": True}, {}),
        "three": answer(
            "2bw", {"defer_embedding_wgrad_compute": True, "delay_wgrad_compute": True}, {"overlap_grad_reduce": True}
        ),
        "name": answer("unheard", {}, {}),
        "long lead": answer("2bw", {}, {}, correction=MomentLead(20.0)),
        "lead without a delay": answer("gpipe", {}, {}, correction=MomentLead(2.0)),
        "one buffer": answer("gpipe", {}, {}, gradient_buffers=1),
        "lead of updates": answer("2bw", {}, {}, correction=UpdateLead(1.0)),
        "lead by name": answer("2bw", {}, {}, correction="lead"),
        "evaluation": answer("2bw", {}, {}, lambda pipeline: pipeline.forward_backward(forward_only=True)),
        "scheduler": answer("2bw", {}, {}, lambda pipeline: pipeline.drive(None).step(1)),
        "synchronous": answer("gpipe", {}, {}, lambda pipeline: pipeline.forward_backward(synchronous=True)),
        "sums in fp32": answer("2bw", {"bf16": True}, {"use_distributed_optimizer": True} | mean_in_fp32),
        "left": answer("2bw", {}, {}, lambda pipeline: pipeline.forward_backward(left=-1)),
        "keyword": answer("2bw", {}, {}, lambda pipeline: pipeline.forward_backward(lefts=0)),
        "reduced by all": answer("2bw", {}, {}, lambda pipeline: pipeline.forward_backward(force_all_reduce=True)),
        "closed": answer("2bw", {}, {}, lambda pipeline: (pipeline.forget(), pipeline.forward_backward(left=0))),
        "step": answer("2bw", {}, {}, lambda pipeline: pipeline.optimizer._inner.step()),
        "two": answer("2bw", {}, {}, lambda used: megatron_2bw.Pipeline("gpipe", used._model, used.optimizer)),
        "mirror": answer("chimera", {}, {}),
        "no mirror": answer("2bw", {}, {}, mirrored=torch.nn.Identity()),
        "three buffers": answer("2bw", {}, {}, gradient_buffers=3),
        "timers": answer("2bw", {"timers": Timers(1, "max")}, {}),
        "bare": answer("2bw", {}, {}, lambda p: (p.forget(), megatron_2bw.Pipeline("2bw", p._model.module, p._inner))),
        "reduced otherwise": answer("2bw", {}, {}, reduced_otherwise),
        "scaled otherwise": answer("2bw", {}, {}, scaled_otherwise),
        "nothing": answer("2bw", {}, {}, lambda pipeline: None),
    }
    torch.save(answers, folder / f"rank{rank}.pt")


def _stage(case: Case, config: dict[str, Any], ddp: dict[str, Any]) -> tuple[Any, Any]:
    """This rank's, with other fields of its configs; and its optimizer."""
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    from .model import build_model

    bare = build_model(case.kind, parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage())
    for name, value in config.items():
        setattr(bare.config, name, value)
    model = DistributedDataParallel(bare.config, DistributedDataParallelConfig(**ddp), bare)
    return model, get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=1e-3, min_lr=0.0), [model])


def failed(case: Case, rank: int, port: int, folder: Path) -> None:
    """Write what every batch says where one cannot be read, and the loop leaves it out and goes on."""

    def reading(forwards: int, output: tuple[torch.Tensor, Any]) -> None:
        if forwards == case.microbatches - 1:
            raise ValueError("an unreadable sample")

    answers, _ = _after_errors(case, rank, port, reading)
    torch.save(answers, folder / f"rank{rank}.pt")


def forgotten(case: Case, rank: int, port: int, folder: Path) -> None:
    """Write what a pipeline leaves behind where the first stage runs out of memory in the middle of the second batch.

    That is: what the batches said, and whether the model shows its newest weights.
    """

    def fail(grad: torch.Tensor) -> None:
        raise torch.OutOfMemoryError("out of memory in a backward")

    def reading(forwards: int, output: tuple[torch.Tensor, Any]) -> None:
        # A forward of the next batch has run by then, and shows newer weights than backwards of this one.
        if rank == 0 and forwards == 2 * case.microbatches - 1:
            output[0].register_hook(fail)

    answers, pipeline = _after_errors(case, rank, port, reading)
    shown = [weight.detach().clone() for weight in pipeline._model.parameters()]
    pipeline.optimizer.weights.use_newest()
    is_newest = all(map(torch.equal, shown, pipeline._model.parameters()))
    torch.save((answers, is_newest), folder / f"rank{rank}.pt")


def _after_errors(case: Case, rank: int, port: int, reading: Any) -> tuple[list[str], Any]:
    """(what every batch said, pipeline) of a loop that goes on after errors and forgets the pipeline in the end.

    Args:
        reading: called with how many forwards have run and the output of the last one.
    """
    initialize(replace(case, schedule="megatron"), rank, case.ranks, port)
    from megatron.core import parallel_state

    import megatron_2bw

    from .record import RankRecord

    model, inner = _stage(case, {}, {"overlap_grad_reduce": case.schedule != "2bw"})
    model.config.no_sync_func = model.no_sync
    pipeline = megatron_2bw.Pipeline(case.schedule, model, inner, timeout=timedelta(seconds=10))
    step, forwards, answers = partial(forward_step, case.kind, RankRecord()), itertools.count(), []

    def forward(data: Any, of_model: Any) -> Any:
        output = step(data, of_model)
        reading(next(forwards), output)
        return output

    data = _microbatches(case, parallel_state.get_data_parallel_rank())
    for batch in range(4):
        model.zero_grad_buffer()
        try:
            pipeline.forward_backward(**_keywords(case, model, data, forward), left=3 - batch)
            pipeline.optimizer.step()
            answers.append("")
        except (ValueError, RuntimeError, KeyError) as error:
            answers.append(repr(error))
        reduces = [group.is_last_microbatch for group in model.bucket_groups]
        assert set(reduces) == {True}, "gradients would not be reduced"
    pipeline.forget()
    return answers, pipeline
