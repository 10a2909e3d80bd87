"""What one training run of the tests is: a schedule, a layout and Megatron's flags."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from itertools import accumulate

SEQUENCE_LENGTH = 16
VOCABULARY = 128
MICRO_BATCH_SIZE = 2
HIDDEN = 32
EVALUATION_ITERATIONS = 2
LOSS_SCALE = 1024.0
LOSS_SCALE_WINDOW = 5

_PRECISION = {
    "fp32": "",
    "bf16": "--bf16",
    "fp16": "--fp16 --accumulate-allreduce-grads-in-fp32 --hysteresis 1 "
    f"--initial-loss-scale {LOSS_SCALE} --loss-scale-window {LOSS_SCALE_WINDOW}",
}
"""Main gradients are in fp32 unless --grad-reduce-in-bf16; the loss scale moves in runs of a dozen batches."""
_OPTIMIZER = {
    "adam": "",
    "muon": "--optimizer muon --muon-momentum 0.95 --muon-nesterov --muon-extra-scale-factor 0.2 --muon-no-split-qkv "
    "--muon-fp32-matmul-prec high --muon-tp-mode blockwise",
    "soap": "--optimizer soap",
    "lion": "--optimizer lion",
    "sgd": "--optimizer sgd --sgd-momentum 0.9 --lr 0.1",
}
_RECOMPUTE = {
    "no": "",
    "selective": "--recompute-granularity selective",
    "full": "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Something done to one rank on purpose."""

    kind: str
    """See ``faults``."""
    rank: int
    call: int = 0
    """The n-th training forward (or backward) of that rank, from 0."""
    seconds: float = 0.0
    text: str = ""
    """A symbol; or of which weight alone the gradient is infinite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One run; equal cases give equal results, so each runs once per session."""

    schedule: str | None = "megatron"
    """Value of ``--pipeline-schedule``; None runs Megatron without the extension."""
    kind: str = "gpt"
    """Of the model: gpt, bert or hybrid."""
    layers: int = 0
    """0 for one per stage, and two at least."""
    stages: int = 1
    microbatches: int = 1
    """Per batch and replica."""
    replicas: int = 1
    batches: int = 20
    steps: tuple[tuple[int, int], ...] = ()
    """(batches, microbatches per batch and replica) of every phase, in place of the two numbers."""
    skipped: tuple[int, ...] = ()
    """Batches left out with ``--iterations-to-skip``, from 0."""
    tied: bool = True
    clip: float = 0.0
    """Gradient norm to clip to; 0 switches clipping off."""
    norm_limit: float = 0.0
    """Gradient norm above which a batch makes no update, which Megatron's config has and no flag; 0 for none."""
    precision: str = "fp32"
    """Of forward and backward: fp32, bf16 or fp16."""
    recompute: str = "no"
    """no, selective or full."""
    tensor_parallel: int = 1
    sequence_parallel: bool = False
    """With a norm that supports it in place of torch's; see ``stand_ins``."""
    context_parallel: int = 1
    """Ranks that share every sequence, with attention that supports it; see ``stand_ins``."""
    expert_parallel: int = 1
    """Part of the replicas, not beside them."""
    expert_tensor_parallel: int = 0
    """Ranks that split one expert; 0 is ``tensor_parallel``."""
    distributed_optimizer: bool = False
    instances: int = 1
    """Groups of replicas that each have a whole distributed optimizer; gradients are summed within them first."""
    optimizer: str = "adam"
    """adam or sgd; or muon, soap or lion, with adam for what is no matrix."""
    moments: str = ""
    """Precision of Adam's moments in the precision-aware optimizer, see ``fused_adam``; none is the usual one."""
    offloaded: float = 0.0
    """Part of the weights that the host updates, see ``offload``."""
    correction: str = "lead"
    """Value of ``--delay-correction``, where there is a lead."""
    lead: float = 0.0
    """Of the correction; 0 leaves updates as they are."""
    delayed: int = 0
    """Value of ``--pipeline-delayed-microbatches``; 0 leaves all delayed."""
    synchronous: int = 0
    """Value of ``--synchronous-warmup-iters``."""
    fused_gradients: bool = False
    """Weight gradients are added to ``main_grad`` in the backward; see ``stand_ins``."""
    clip_attention: float = 0.0
    """The largest logit that QK-clip allows; 0 for any. With attention that records them, see ``attention``."""
    frozen: tuple[str, ...] = ()
    """Weights that are not trained: how their names in the undivided model begin."""
    model: tuple[str, ...] = ()
    """Flags that change what is computed; an oracle needs them too."""
    flags: tuple[str, ...] = ()
    """More Megatron flags, which change no number."""
    faults: tuple[Fault, ...] = ()
    record_actions: bool = False
    """Keep when every action ran."""
    record_gradients: bool = False
    """Keep the gradient of every update."""
    device: str = "cpu"
    """cpu, or cuda: all ranks share the GPUs that there are."""

    @property
    def ranks(self) -> int:
        return self.stages * self.replicas * self.tensor_parallel * self.context_parallel

    @property
    def num_layers(self) -> int:
        return self.layers or max(self.stages, 2)

    @property
    def microbatches_per_row(self) -> int:
        """Of losses in results: a row is a batch, or a microbatch where batches differ."""
        return 1 if self.steps else self.microbatches

    @property
    def global_batch_size(self) -> int:
        return self.samples(self.microbatches)

    def samples(self, microbatches: int) -> int:
        """Of so many microbatches on all replicas."""
        return MICRO_BATCH_SIZE * microbatches * self.replicas

    def sizes(self) -> list[int]:
        """Microbatches of every batch, per replica."""
        phases = self.steps or ((self.batches, self.microbatches),)
        return [microbatches for batches, microbatches in phases for _ in range(batches)]

    def spans(self) -> list[range]:
        """Of every batch that is not left out: which of a replica's microbatches it has."""
        starts, sizes = accumulate(self.sizes(), initial=0), self.sizes()
        spans = [range(start, start + size) for start, size in zip(starts, sizes, strict=False)]
        return [span for batch, span in enumerate(spans) if batch not in self.skipped]

    def ends(self) -> list[int]:
        """After every batch that is not left out: Megatron's number of the iteration."""
        return [batch + 1 for batch in range(len(self.sizes())) if batch not in self.skipped]

    def rest(self, iteration: int) -> Case:
        """What is left to do after one of `ends`, with the faults of these batches."""
        done = self.rows_until(iteration) * self.microbatches_per_row
        left = [replace(fault, call=fault.call - done) for fault in self.faults if fault.call >= done]
        return replace(self, faults=tuple(left))

    def rows_until(self, iteration: int) -> int:
        """Of losses in results, up to one of `ends`."""
        spans = self.spans()[: self.ends().index(iteration) + 1]
        return sum(len(span) for span in spans) // self.microbatches_per_row

    def arguments(self) -> list[str]:
        """Megatron's command line.

        The learning rate warms up and decays, so that that of another batch shows. Adam's epsilon is
        large: where the true gradient is zero (key biases), a small one blows rounding up to full steps.
        """
        arguments = [
            *(() if self.schedule is None else ("--pipeline-schedule", self.schedule)),
            *f"--pipeline-model-parallel-size {self.stages} --clip-grad {self.clip!r}".split(),
            *f"--micro-batch-size {MICRO_BATCH_SIZE}".split(),
            *(self._growing() if self.steps else self._of_one_size()),
            *f"--num-layers {self.num_layers} --hidden-size {HIDDEN} --num-attention-heads 2".split(),
            *f"--seq-length {SEQUENCE_LENGTH} --max-position-embeddings {SEQUENCE_LENGTH}".split(),
            *f"--vocab-size {VOCABULARY} --make-vocab-size-divisible-by 1 --tokenizer-type NullTokenizer".split(),
            *"--attention-dropout 0 --hidden-dropout 0 --weight-decay 0.1 --adam-eps 1e-3".split(),
            *"--lr 5e-3 --min-lr 5e-4 --lr-warmup-init 1e-3 --lr-decay-style cosine".split(),
            *"--num-workers 0 --eval-iters 0 --eval-interval 1000 --log-interval 1000".split(),
            *"--distributed-timeout-minutes 2 --distributed-backend gloo --transformer-impl local".split(),
            *"--no-persist-layer-norm --no-gradient-accumulation-fusion --no-masked-softmax-fusion".split(),
            "--no-rope-fusion",
            *(("--pipeline-trace", os.devnull) if self.record_actions else ()),
            *_OPTIMIZER[self.optimizer].split(),
            *(self._precision_aware() if self.moments and self.schedule else ()),
            *(self._offloading() if self.offloaded and self.schedule else ()),
            *(("--adam-beta1", "0.95") if self.lead else ()),
            *(self._correction() if self.lead and self.schedule else ()),
            *(("--pipeline-delayed-microbatches", str(self.delayed)) if self.delayed and self.schedule else ()),
            *(("--synchronous-warmup-iters", str(self.synchronous)) if self.synchronous and self.schedule else ()),
            *(() if self.tied else ("--untie-embeddings-and-output-weights",)),
            *f"{_PRECISION[self.precision]} {_RECOMPUTE[self.recompute]}".split(),
            *self._parallelism(),
        ]
        return [*arguments, *self.model, *self.flags]

    def _of_one_size(self) -> list[str]:
        size = f"--global-batch-size {self.global_batch_size} --train-iters {self.batches}"
        return f"{size} --lr-warmup-iters 4 --lr-decay-iters 30".split()

    def _growing(self) -> list[str]:
        """For a number of samples."""
        starts, consumed = [], 0
        for batches, microbatches in self.steps:
            starts.append(f"{consumed * SEQUENCE_LENGTH}:{self.samples(microbatches)}")  # Megatron wants tokens.
            consumed += self.samples(batches * microbatches)
        sized = ["--step-batch-size-schedule", " ".join(starts)]
        if len(starts) == 1:
            sized = ["--global-batch-size", str(self.samples(self.steps[0][1]))]
        skipping = ["--iterations-to-skip", *(str(batch + 1) for batch in self.skipped)] if self.skipped else []
        rates = f"--lr-warmup-samples {consumed // 5} --lr-decay-samples {consumed}".split()
        return [*sized, "--train-samples", str(consumed), *rates, *skipping]

    def _precision_aware(self) -> tuple[str, ...]:
        moments = ("--exp-avg-dtype", self.moments, "--exp-avg-sq-dtype", self.moments)
        return "--use-precision-aware-optimizer", *moments

    def _offloading(self) -> tuple[str, ...]:
        part = "--optimizer-offload-fraction", str(self.offloaded)
        return "--use-precision-aware-optimizer", "--optimizer-cpu-offload", *part

    def _correction(self) -> tuple[str, ...]:
        return "--delay-correction", self.correction, "--delay-lead", str(self.lead)

    def _parallelism(self) -> list[str]:
        sizes = {
            "tensor-model": self.tensor_parallel,
            "context": self.context_parallel,
            "expert-model": self.expert_parallel,
        }
        return [
            *(word for name, size in sizes.items() if size > 1 for word in (f"--{name}-parallel-size", str(size))),
            *(
                ("--expert-tensor-parallel-size", str(self.expert_tensor_parallel))
                if self.expert_tensor_parallel
                else ()
            ),
            *(("--sequence-parallel",) if self.sequence_parallel else ()),
            *(("--use-distributed-optimizer",) if self.distributed_optimizer else ()),
            *(
                ("--num-distributed-optimizer-instances", str(self.instances))
                if self.distributed_optimizer and self.instances > 1
                else ()
            ),
        ]
