"""Runs the measurements of a profile on this machine, one job per tensor-parallel size."""

from __future__ import annotations

import datetime
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from megatron_2bw.planner.errors import PlanError
from megatron_2bw.planner.flags import layout_flags, model_flags
from megatron_2bw.planner.layout import Layout, Precision, Recompute
from megatron_2bw.planner.model import Kind, Model
from megatron_2bw.planner.multiples import nearest_divisor
from megatron_2bw.planner.profile import LAYERS, Profile
from megatron_2bw.planner.rules import tensor_problem
from megatron_2bw.planner.table import bar
from megatron_2bw.planner.torchrun import lines_of

_DONE = "profiled: "
_WORDS = "--mock-data --tokenizer-type NullTokenizer --train-iters 1 --lr 1e-4 --clip-grad 1.0 --rerun-mode disabled"


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What to measure."""

    model: Model
    ranks: int
    tensors: tuple[int, ...]
    microbatches: tuple[int, ...]
    recomputes: tuple[Recompute, ...]
    """``none`` first."""
    precision: Precision
    fused_attention: bool

    def __post_init__(self) -> None:
        if self.model.kind is not Kind.GPT:
            raise PlanError(f"model kind {self.model.kind}: profile times GPT layers; use gpt")
        if self.ranks < 1:
            raise PlanError(f"gpus {self.ranks}: give a whole number of at least 1")
        for tensor in self.tensors:
            if self.ranks % tensor:
                nearest = nearest_divisor(self.ranks, tensor)
                raise PlanError(f"tensor {tensor} does not divide gpus {self.ranks}; use {nearest}")
            problem = tensor_problem(self.model, tensor, sequence_parallel=False)
            if problem:
                raise PlanError(problem)

    def begin(self) -> Profile:
        """Without measurements."""
        return Profile(
            model=self.model,
            ranks=self.ranks,
            precision=self.precision,
            fused_attention=self.fused_attention,
            date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        )

    def missing(self, profile: Profile, tensor: int) -> int:
        """How many measurements ``profile`` lacks of those with ``tensor``."""
        wanted = ((microbatch, recompute) for microbatch in self.microbatches for recompute in self.recomputes)
        blocks = sum(profile.block(tensor, *one) is None for one in wanted)
        return blocks + all(update.tensor != tensor for update in profile.updates)

    def words(self, tensor: int, path: Path) -> list[str]:
        """Behind ``torchrun``."""
        layout = Layout(
            schedule="megatron",
            pipeline=1,
            data=self.ranks // tensor,
            tensor=tensor,
            global_batch=self.ranks // tensor,
            precision=self.precision,
            fused_attention=self.fused_attention,
        )
        model = replace(self.model, num_layers=LAYERS)
        return [
            *("-m", "megatron_2bw.mcore.profile", "--profile", str(path)),
            *("--microbatches", ",".join(map(str, self.microbatches)), "--recomputes", ",".join(self.recomputes)),
            *(*layout_flags(model, layout), *model_flags(model), *_WORDS.split()),
            *("--vocab-size", str(self.model.vocab_size - 1)),  # NullTokenizer adds one token.
        ]


def measure(request: Request, path: Path) -> None:
    """Measure what the file at ``path`` lacks; every measurement is kept as soon as it is there.

    Raises:
        PlanError: the file is of something else, or a job failed.
    """
    begun = request.begin()
    if path.exists():
        profile = Profile.load(path)
        if not profile.continues(begun):
            raise PlanError(
                f"{path} is a profile of another model, precision or number of ranks; give another --output"
            )
    else:
        profile = begun
        profile.save(path)
    missing = {tensor: request.missing(profile, tensor) for tensor in request.tensors}
    total, done = sum(missing.values()), 0
    for tensor in (tensor for tensor, count in missing.items() if count):
        _show(done, total, f"starting {request.ranks} ranks, tensor {tensor}")
        for line in lines_of(
            request.words(tensor, path), ranks=request.ranks, what=f"the profile with tensor {tensor}"
        ):
            if line.startswith(_DONE):
                done += 1
                _show(done, total, line.removeprefix(_DONE))


def _show(done: int, total: int, what: str) -> None:
    print(f"{bar(min(done, total), total)} {what}", file=sys.stderr, flush=True)
