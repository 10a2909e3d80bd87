"""Runs the measurements of a profile on this machine, one job per tensor-parallel size."""

from __future__ import annotations

import datetime
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megatron_2bw.planner.errors import PlanError
from megatron_2bw.planner.flags.flags import layout_flags
from megatron_2bw.planner.flags.model_flags import model_flags
from megatron_2bw.planner.measure.profile import DONE, LAYERS, Block, Profile, Setting
from megatron_2bw.planner.measure.torchrun import lines_of, random_data
from megatron_2bw.planner.memory import activations
from megatron_2bw.planner.multiples import nearest_divisor
from megatron_2bw.planner.rules import tensor_problem
from megatron_2bw.planner.specs.layout import Layout, Precision, Recompute
from megatron_2bw.planner.specs.model import Kind, Model
from megatron_2bw.planner.table import bar, seconds, table

_TRAINING = "--train-iters 1 --lr 1e-4 --clip-grad 1.0 --rerun-mode disabled".split()


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What to measure."""

    model: Model
    setting: Setting
    tensors: tuple[int, ...]
    microbatches: tuple[int, ...]
    recomputes: tuple[Recompute, ...]
    """``none`` first."""
    more_flags: tuple[str, ...] = ()
    """Megatron's, for the runs."""

    def __post_init__(self) -> None:
        ranks = self.setting.ranks
        if self.model.kind is not Kind.GPT:
            raise PlanError(f"model kind {self.model.kind}: profile times GPT layers; use gpt")
        for name in ("dense_layers", "mtp_num_layers"):
            if count := getattr(self.model, name):
                raise PlanError(f"{name} {count}: profile times layers of one kind; profile a model without them")
        if self.setting.fused_attention and self.setting.precision is Precision.FP32:
            raise PlanError("fused attention: there are no such kernels in fp32; use bf16, or unfused attention")
        if ranks < 1:
            raise PlanError(f"gpus {ranks}: give a whole number of at least 1")
        for tensor in self.tensors:
            if ranks % tensor:
                raise PlanError(f"tensor {tensor} does not divide gpus {ranks}; use {nearest_divisor(ranks, tensor)}")
            layout = self.layout(tensor)
            if problem := tensor_problem(self.model, layout, sequence_parallel=layout.sequence_parallel):
                raise PlanError(problem)

    def begin(self) -> Profile:
        """Without measurements."""
        today = datetime.datetime.now(datetime.UTC).date().isoformat()
        return Profile(model=self.model, setting=self.setting, date=today)

    def missing(self, profile: Profile, tensor: int) -> int:
        """How many measurements ``profile`` lacks of those with ``tensor``; links are measured with the first."""
        wanted = ((microbatch, recompute) for microbatch in self.microbatches for recompute in self.recomputes)
        blocks = sum(profile.block(tensor, *one) is None for one in wanted)
        links = tensor == self.tensors[0] and not profile.has_links
        return blocks + links + (profile.update(tensor) is None)

    def layout(self, tensor: int, microbatch: int = 1, recompute: Recompute = Recompute.NONE) -> Layout:
        """One stage on every ``tensor`` ranks: how a block is measured."""
        setting = self.setting
        data = setting.ranks // tensor
        return Layout(
            schedule="megatron",
            pipeline=1,
            data=data,
            tensor=tensor,
            microbatch=microbatch,
            global_batch=microbatch * data,
            recompute=recompute,
            sequence_parallel=setting.sequence_parallel and tensor > 1,
            precision=setting.precision,
            fused_attention=setting.fused_attention,
        )

    def words(self, tensor: int, path: Path) -> list[str]:
        """Behind ``torchrun``."""
        return [
            *("-m", "megatron_2bw.mcore.profile", "--profile", str(path)),
            *("--microbatches", ",".join(map(str, self.microbatches)), "--recomputes", ",".join(self.recomputes)),
            *(*layout_flags(self.model, self.layout(tensor)), *model_flags(self.model)),
            # In place of the model's: the last one counts.
            *("--num-layers", str(LAYERS), *(("--moe-layer-freq", "1") if self.model.num_experts else ())),
            *(*_TRAINING, *random_data(self.model), *self.more_flags),
        ]


def measure(request: Request, path: Path) -> Profile:
    """Measure what the file at ``path`` lacks, if anything; every measurement is kept as soon as it is there.

    Raises:
        PlanError: the file is of something else, a job failed, or nothing fits into memory.
    """
    begun = request.begin()
    if path.exists():
        profile = Profile.load(path)
        if not profile.continues(begun):
            raise PlanError(f"{path} is of another model, setting or number of ranks; give another --output")
    else:
        profile = begun
        profile.save(path)
    missing = {tensor: request.missing(profile, tensor) for tensor in request.tensors}
    total, done = sum(missing.values()), 0
    if not total:
        print(
            f"{path} lacks nothing, so nothing was measured: it is of {profile.date}, {profile.device}, "
            f"{profile.versions}; to measure again, give another --output",
            file=sys.stderr,
        )
    for tensor in (tensor for tensor, count in missing.items() if count):
        _show(done, total, f"starting {request.setting.ranks} ranks, tensor {tensor}")
        words = request.words(tensor, path)
        for line in lines_of(words, ranks=request.setting.ranks, what=f"the profile with tensor {tensor}"):
            if line.startswith(DONE):
                done += 1
                _show(done, total, line.removeprefix(DONE))
    profile = Profile.load(path)
    if not any(profile.update(block.tensor) for block in profile.blocks if block.tensor in request.tensors):
        sizes = ", ".join(map(str, request.tensors))
        raise PlanError(
            f"tensor {sizes}: {LAYERS} layers with their gradients and optimizer, and a microbatch of "
            f"{min(request.microbatches)}, do not fit into memory; give a larger --tensor-model-parallel-size"
        )
    return profile


def _show(done: int, total: int, what: str) -> None:
    print(f"{bar(min(done, total), total)} {what}", file=sys.stderr, flush=True)


def summary(request: Request, profile: Profile) -> Iterator[str]:
    """A table of the layers: times, and what they keep beside what the planner expects."""
    head = ("layer", "forward", "backward", "kept/MiB", "expected/MiB")
    yield from table(head, (_summary(request, block) for block in profile.blocks if block.tensor in request.tensors))


def _summary(request: Request, block: Block) -> list[str]:
    layer = activations.of_layer(request.model, request.layout(block.tensor, block.microbatch, block.recompute))
    expected_bytes = layer.input if block.recompute is Recompute.FULL else layer.kept
    return [
        f"t{block.tensor} b{block.microbatch} {block.recompute}",
        seconds(block.layer_forward_s),
        seconds(block.layer_backward_s),
        *(f"{size_bytes / 2**20:.1f}" for size_bytes in (block.layer_kept_bytes, expected_bytes)),
    ]
