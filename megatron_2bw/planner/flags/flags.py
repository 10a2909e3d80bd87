"""Megatron's flags for a Layout, and back."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

from megatron_2bw.planner.errors import PlanError
from megatron_2bw.planner.flags.accepted import (
    BACKEND,
    DIST_MUON,
    FLEX,
    GROUP,
    GROUPED,
    MAIN_GRADIENTS,
    MODULES,
    NO_OVERLAP,
    OPTIMIZERS,
    PIPELINE_LAYOUT,
    PRECISION_AWARE,
    RECEIVES,
    SETTINGS,
    STEPS,
    STORED_IN,
    check_accepted,
    counted,
    interleaves,
    is_local,
)
from megatron_2bw.planner.flags.model_flags import (
    DROPOUT,
    MODEL_FLAGS,
    MODEL_NUMBERS,
    MODEL_SWITCHES,
    guessed_vocabulary,
    read_model,
)
from megatron_2bw.planner.flags.options import Options
from megatron_2bw.planner.flags.unpriced import CHECKED, check_priced, optimizer_of
from megatron_2bw.planner.multiples import nearest_divisor, nearest_multiple
from megatron_2bw.planner.naming import schedule_name
from megatron_2bw.planner.papers.automatic import AUTO, choose, has_choice
from megatron_2bw.planner.rules import problem
from megatron_2bw.planner.specs.adam_state import AdamState
from megatron_2bw.planner.specs.cluster import Gpu
from megatron_2bw.planner.specs.inputs import modules_of
from megatron_2bw.planner.specs.kernels import fuses_attention, gpu_problem
from megatron_2bw.planner.specs.layout import (
    Dispatcher,
    Fp8,
    Layout,
    Optimizer,
    Precision,
    Receives,
    Recompute,
    RecomputeMethod,
    RecomputeModule,
)
from megatron_2bw.planner.specs.model import Kind, Model
from megatron_2bw.planner.specs.pipeline_layout import COUNTED, counted_layout
from megatron_2bw.planner.spelling import misspelled
from megatron_2bw.planner.table import GIB
from megatron_2bw.schedule.registry import MEGATRON

_COUNTS = {
    "--tensor-model-parallel-size": "tensor",
    "--context-parallel-size": "context",
    "--expert-model-parallel-size": "expert",
    "--expert-tensor-parallel-size": "expert_tensor",
    "--pipeline-model-parallel-size": "pipeline",
    "--decoder-first-pipeline-num-layers": "first_stage_layers",
    "--decoder-last-pipeline-num-layers": "last_stage_layers",
    "--pipeline-extra-in-flight": "extra_in_flight",
    "--pipeline-delayed-microbatches": "delayed_microbatches",
    "--mixpipe-k": "mixpipe_k",
    "--mixpipe-gamma": "mixpipe_gamma",
    "--pipeline-gradient-buffers": "gradient_buffers",
    "--num-distributed-optimizer-instances": "optimizer_instances",
    "--micro-batch-size": "microbatch",
}
"""Flags with a number of the Layout that others do not depend on."""
_USUAL = {"context": 1, "expert": 1, "gradient_buffers": 2, "optimizer_instances": 1}
"""Of them, what no flag is needed for; of those that are not here, 0."""
_LAYOUT_NUMBERS = _COUNTS | {
    "--recompute-num-layers": "recompute_layers",
    "--num-virtual-stages-per-pipeline-rank": "chunks",
}
"""Flags with a number of the Layout."""
_LAYOUT_SWITCHES = {
    "--overlap-moe-expert-parallel-comm": "overlap_exchanges",
    "--sequence-parallel": "sequence_parallel",
    "--use-distributed-optimizer": "distributed_optimizer",
    "--overlap-grad-reduce": "overlap_gradients",
    "--overlap-param-gather": "overlap_parameters",
    **{flag: field for flag, (field, on) in SETTINGS.items() if on},
}
"""Flags that switch something of the Layout on; some do so only beside others."""
FIELDS = MODEL_NUMBERS | _LAYOUT_NUMBERS | _LAYOUT_SWITCHES
"""By flag: what it is called in the Model or the Layout."""
_MOE_LAYER = "--moe-layer-recompute"
ATTENTION_BACKENDS = ("auto", "flash", "fused", "unfused", "local")
_FUSED_LOSS = {"--cross-entropy-loss-fusion", "--cross-entropy-fusion-impl"}
FP8_FORMATS = ("hybrid", "e4m3")
_IN_BLOCKS = (Fp8.BLOCKWISE, Fp8.MXFP8)
"""Recipes whose scales are fine enough for gradients in e4m3."""
SWITCHES = frozenset(
    {
        *MODEL_SWITCHES,
        *_LAYOUT_SWITCHES,
        *SETTINGS,
        *"--bf16 --fp16 --recompute-activations --use-flash-attn --cross-entropy-loss-fusion".split(),
        PRECISION_AWARE,
        *COUNTED,
    }
)
"""Flags without a value."""
_AT_MOST_ONE = frozenset(
    {
        *FIELDS,
        *SWITCHES,
        *DROPOUT,
        *"--global-batch-size --pipeline-schedule --transformer-impl --attention-backend --fp8-format".split(),
        *"--recompute-granularity --recompute-method --fp8-recipe --normalization --moe-layer-freq".split(),
        *("--position-embedding-type", STEPS, RECEIVES),
    }
)
"""Flags with one value or none."""
DECIDED = frozenset(
    {
        *_LAYOUT_NUMBERS,
        *_LAYOUT_SWITCHES,
        *COUNTED,
        *"--pipeline-schedule --num-layers-per-virtual-pipeline-stage --recompute-granularity".split(),
        *("--recompute-method", "--recompute-activations", MODULES, _MOE_LAYER, PIPELINE_LAYOUT, GROUP, STEPS),
    }
)
"""Flags that say how a model and its batches are split, which a plan decides."""
SPELLED = frozenset(
    {
        *MODEL_FLAGS,
        *_LAYOUT_NUMBERS,
        *SWITCHES,
        *CHECKED,
        *"--global-batch-size --pipeline-schedule --num-layers-per-virtual-pipeline-stage --transformer-impl".split(),
        *"--recompute-granularity --recompute-method --attention-backend --cross-entropy-fusion-impl".split(),
        *(MODULES, _MOE_LAYER, MAIN_GRADIENTS, *STORED_IN, RECEIVES),
        *f"--merge-file --vocab-file --fp8-format --fp8-recipe {PIPELINE_LAYOUT}".split(),
        # Megatron's own, which look like others.
        *"--encoder-num-layers --decoder-seq-length --eval-global-batch-size --tp-comm-overlap-cfg".split(),
        *"--moe-expert-rank-capacity-factor --moe-z-loss-coeff --fp4-recipe --fp4-param-gather".split(),
        "--mtp-hybrid-override-pattern",
    }
)
"""Flags that are spelled correctly."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """A run as its flags describe it."""

    model: Model
    layout: Layout
    notes: tuple[str, ...] = ()
    """What the flags say beyond that, and the estimate leaves out."""


def read(
    options: Options,
    *,
    gpus: int | None,
    node: int = 1,
    kind: Kind = Kind.GPT,
    gpu: Gpu | None = None,
    fused: bool | None = None,
    model: Model | None = None,
) -> Configuration:
    """The Model and Layout that Megatron's flags describe.

    Args:
        options: flags; those without influence on the costs are ignored.
        gpus: world size, from which Megatron derives the data-parallel size.
        node: GPUs of each node.
        kind: of the model; Megatron has a script per kind and no flag.
        gpu: that has to support what the flags ask for; None does not limit them.
        fused: whether attention is, where no flag says; None: where ``gpu`` has kernels for it.
        model: in place of the one that flags describe.

    Raises:
        PlanError: a flag is missing, malformed, refused by Megatron or beyond the cost model.
    """
    from megatron_2bw.planner.flags.refusals import refusal  # A search prints flags and reads none.

    model, notes = described(options, kind=kind, model=model)
    layout = _layout(options, model, gpus, node=node, gpu=gpu, fused=fused)
    if options.text("--mixpipe-k", "0") == AUTO and has_choice(layout):
        if gpu is None:
            raise PlanError(f"--mixpipe-k {AUTO}: that depends on the GPU; give --cluster, or a number")
        layout = choose(model, layout, gpu.memory_gb * GIB)
    refused = refusal(options, layout) or problem(model, layout)
    if gpu is not None:
        used = {"fused_attention": layout.fused_attention, "fp8": layout.fp8, "dispatcher": layout.dispatcher}
        used["modules"] = layout.modules_again
        refused = refused or gpu_problem(gpu, layout.precision, **used)
    if refused:
        doubts = tuple(_misspelled(options))  # What is misspelled may be why.
        raise PlanError("; ".join(map(str, (refused, *doubts))) if doubts else refused)
    return Configuration(model=model, layout=layout, notes=notes)


def described(options: Options, *, kind: Kind, model: Model | None = None) -> tuple[Model, tuple[str, ...]]:
    """The Model that flags describe, or ``model``, and notes on what a price leaves out.

    Raises:
        PlanError: as ``read``, but for what depends on the Layout.
    """
    check_accepted(options)
    _check_counts(options)
    notes = [*check_priced(options), *_misspelled(options)]
    if model is None:
        model = read_model(options, kind=kind)
        notes = [*guessed_vocabulary(options, kind), *notes]
    return model, (*notes, *_without_effect(options, model))


def _check_counts(options: Options) -> None:
    """Whether every flag has as many values as Megatron's parser takes.

    Raises:
        PlanError: one has more.
    """
    for flag, words in options.values.items():
        most = 0 if flag in SWITCHES else 1
        known = [word for word in words if options.is_known(word)]  # What nothing sets may be no word at all.
        if flag in _AT_MOST_ONE and len(known) > most:
            rule = "it takes one value" if most else "it takes no value"
            remedy = "quote it" if flag == STEPS else f"leave out {known[most]!r}"
            raise PlanError(f"{flag} {' '.join(map(options.explain, known))}: {rule}; {remedy}")


def _misspelled(options: Options) -> Iterator[str]:
    """A note per flag that nothing here reads and that looks like one that is read."""
    for flag in options.values:
        if nearest := misspelled(flag, SPELLED):
            yield f"{flag}: not priced; did you mean {nearest}?"


def _without_effect(options: Options, model: Model) -> Iterator[str]:
    """A note per flag that Megatron drops."""
    if "--tp-comm-overlap" in options and model.multi_latent_attention:
        yield "--tp-comm-overlap: priced without, as Megatron switches it off beside latent attention"
    if MODULES in options and _recompute(options) is not Recompute.SELECTIVE:
        yield f"{MODULES}: priced without, as Megatron looks at it under --recompute-granularity selective alone"
    if "--fp8-format" in options and is_local(options):
        yield "--fp8-format: priced without, as Megatron's own layers have no products in 8 bits"


def _layout(
    options: Options, model: Model, gpus: int | None, *, node: int, gpu: Gpu | None, fused: bool | None
) -> Layout:
    numbers = {
        name: options.number(flag)
        for flag, name in _LAYOUT_NUMBERS.items()
        if flag in options and (flag != "--mixpipe-k" or options.text(flag) != AUTO)
    }
    numbers.setdefault("pipeline", 1)
    numbers.setdefault("tensor", 1)
    numbers.setdefault("context", 1)
    if "microbatch" not in numbers:
        raise options.missing("--micro-batch-size", "Megatron has no default")
    for name in ("pipeline", "tensor", "context", "expert", "expert_tensor", "microbatch", "delayed_microbatches"):
        if numbers.get(name, 1) < 1:
            raise PlanError(f"{name} {numbers[name]}: give a whole number of at least 1")
    data = replicas(gpus, numbers["pipeline"] * numbers["tensor"] * numbers["context"], node=node)
    if not model.num_experts:
        numbers.pop("expert_tensor", None)  # Megatron does not look at it.
    if "--num-layers-per-virtual-pipeline-stage" in options:
        per_chunk = options.number("--num-layers-per-virtual-pipeline-stage")
        numbers["chunks"] = _chunks(per_chunk, model.num_layers + sum(counted(options)), numbers["pipeline"])
    optimizer = options.choice("--optimizer", OPTIMIZERS, Optimizer.ADAM)
    precision = Precision.BF16 if "--bf16" in options else Precision.FP16 if "--fp16" in options else Precision.FP32
    if fused is None:
        fused = precision is not Precision.FP32 if gpu is None else fuses_attention(gpu, precision)
    switches = {field: flag in options for flag, field in _LAYOUT_SWITCHES.items()}
    switches["sequence_parallel"] &= numbers["tensor"] > 1
    switches["distributed_optimizer"] |= optimizer == DIST_MUON
    switches["gradients_in_fp32"] &= precision is Precision.FP16
    switches["gradients_in_bf16"] |= options.choice(MAIN_GRADIENTS, ("fp32", "bf16"), "fp32") == "bf16"
    switches["gradients_in_bf16"] &= precision is Precision.BF16
    return Layout(
        schedule=schedule_name(options.text("--pipeline-schedule", MEGATRON)),
        receives=_receives(options),
        data=data,
        pipeline_layout=_pipeline_layout(options, model, numbers["pipeline"] * numbers.get("chunks", 1)),
        global_batch=global_batch_of(options, numbers["microbatch"] * data),
        recompute=_recompute(options),
        recompute_modules=_modules(options),
        recompute_method=RecomputeMethod(
            options.choice("--recompute-method", RecomputeMethod, RecomputeMethod.UNIFORM)
        ),
        optimizer=optimizer_of(optimizer) or Optimizer.ADAM,
        adam_state=_adam_state(options) if PRECISION_AWARE in options else None,
        fused_loss=_FUSED_LOSS.issubset(options.values) and options.text("--cross-entropy-fusion-impl") == "te",
        dispatcher=_dispatcher(options) if model.num_experts else Dispatcher.ALLTOALL,
        precision=precision,
        fp8=fp8_of(options),
        fused_attention=fuses(options, fused),
        fused_swiglu=not (model.swiglu and "--no-bias-swiglu-fusion" in options),
        overlap_transfers=not (interleaves(options) and NO_OVERLAP in options),
        **switches,
        **numbers,
    )


def _receives(options: Options) -> Receives:
    return Receives(options.choice(RECEIVES, ("late", "early"), "late")) if RECEIVES in options else Receives.DEFAULT


def _adam_state(options: Options) -> AdamState:
    """Megatron's choices and defaults."""
    return AdamState(*(options.choice(flag, choices, choices[0]) for flag, choices in STORED_IN.items()))


def global_batch_of(options: Options, least: int | None) -> int | None:
    """The last one, where it grows; Megatron's default is ``least``, one microbatch per replica."""
    if STEPS not in options:
        return options.number("--global-batch-size", least)
    text = options.text(STEPS)
    try:
        steps = sorted(tuple(map(_quantity, step.split(":"))) for step in text.replace(",", " ").split())
        _, last = steps[-1]
    except (ValueError, IndexError, OverflowError) as error:
        raise PlanError(f"{STEPS} {text!r}: give pairs such as '0:768 250B:1536'") from error
    return last


def _quantity(text: str) -> int:
    """As Megatron reads it: 2.5K is 2500.

    Raises:
        ValueError: it is no number.
    """
    power = "KMBT".find(text[-1:].upper()) + 1 if text else 0
    return int(float(text[:-1] if power else text) * 1000**power)


def _pipeline_layout(options: Options, model: Model, stages: int) -> str:
    embedding, loss = counted(options)
    if embedding or loss:
        return counted_layout(model.num_layers, model.mtp_num_layers, stages, embedding=embedding, loss=loss)
    text = options.text(PIPELINE_LAYOUT)
    if PIPELINE_LAYOUT in options and not text:
        raise PlanError(f"{PIPELINE_LAYOUT} is empty: it has no embedding; leave it out, or give such as 'Et|tL'")
    return text


def replicas(gpus: int | None, ranks: int, *, node: int = 1) -> int:
    """Data-parallel size of so many GPUs, of nodes with ``node``, where a replica has ``ranks``.

    Raises:
        PlanError: it is no whole number.
    """
    if gpus is None:
        raise PlanError(f"the number of GPUs is not known; give --gpus N, a multiple of {ranks}")
    if gpus < 1 or gpus % ranks:
        whole = nearest_multiple(gpus, math.lcm(ranks, node))
        sizes = [whole, *range(ranks, node, ranks)]  # Whole nodes, or a part of one.
        nearest = min(sizes, key=lambda size: abs(size - gpus))
        raise PlanError(f"gpus {gpus} is no multiple of tensor x context x pipeline = {ranks}; use {nearest}")
    return gpus // ranks


def _chunks(per_chunk: int, layers: int, pipeline: int) -> int:
    """Virtual stages per rank, of so many of these layers each.

    Raises:
        PlanError: they do not divide the layers of a stage.
    """
    flag = f"--num-layers-per-virtual-pipeline-stage {per_chunk}"
    if layers % pipeline:
        nearest = nearest_divisor(layers, pipeline)
        raise PlanError(
            f"{flag}: {pipeline} stages do not divide the {layers} layers; use {nearest} stages, or give "
            "--num-virtual-stages-per-pipeline-rank with other numbers of layers in the first and the last"
        )
    per_stage = layers // pipeline
    if per_chunk < 1 or per_stage % per_chunk:
        nearest = nearest_divisor(per_stage, per_chunk)
        raise PlanError(f"{flag} does not divide the {per_stage} layers of a stage; use {nearest}")
    return per_stage // per_chunk


def _recompute(options: Options) -> Recompute:
    if "--recompute-activations" in options or _MOE_LAYER in options:
        return Recompute.SELECTIVE
    return Recompute(options.choice("--recompute-granularity", Recompute, Recompute.NONE))


def _modules(options: Options) -> tuple[RecomputeModule, ...]:
    words = options.words(MODULES) if MODULES in options else [RecomputeModule.CORE_ATTN]
    return modules_of([*words, *[RecomputeModule.MOE] * (_MOE_LAYER in options)], MODULES)


def _dispatcher(options: Options) -> Dispatcher:
    if options.text("--moe-token-dispatcher-type") != FLEX:
        return Dispatcher.ALLTOALL
    backends = [dispatcher for dispatcher in Dispatcher if dispatcher.is_flexible]
    return Dispatcher(options.choice(BACKEND, backends, Dispatcher.DEEPEP))


def _dispatcher_flags(dispatcher: Dispatcher) -> str:
    type_ = f"{FLEX} {BACKEND} {dispatcher}" if dispatcher.is_flexible else dispatcher
    return f"--moe-token-dispatcher-type {type_}"


def fp8_of(options: Options) -> Fp8:
    """The recipe of layers' products in 8 bits."""
    recipes = [recipe for recipe in Fp8 if recipe is not Fp8.NONE]
    if "--fp8-format" not in options or is_local(options):
        return Fp8.NONE  # Layers of Megatron's own have none.
    options.choice("--fp8-format", FP8_FORMATS, FP8_FORMATS[0])
    return Fp8(options.choice("--fp8-recipe", recipes, Fp8.DELAYED))


def fuses(options: Options, default: bool | None) -> bool | None:
    """Whether attention is fused, which Megatron decides by itself where no flag does."""
    backend = options.choice("--attention-backend", ATTENTION_BACKENDS, ATTENTION_BACKENDS[0])
    if "--use-flash-attn" in options:
        return True
    if is_local(options):
        return False
    return {"auto": default, "unfused": False, "local": False}.get(backend, True)


_FLAG_OF = {
    **{name: flag for flag, name in FIELDS.items()},
    "global_batch": "--global-batch-size",
    "pipeline_layout": PIPELINE_LAYOUT,
    "recompute_modules": MODULES,
    "schedule": "--pipeline-schedule",
    "fp8": "--fp8-recipe",
    "recompute": "--recompute-granularity",
}
_SWITCHED = re.compile(r"--([\w-]+) (True|False)\b")
_FIELD = re.compile(rf"(use )?(?<![-\w])({'|'.join(_FLAG_OF)})(?![-\w])( -?\d)?")


def in_flags(message: str) -> str:
    """``message``, which has names of fields, for those who gave flags.

    >>> in_flags("microbatches 1: 2bw needs at least 15 on 16 stages; raise global_batch to 120")
    'microbatches 1: 2bw needs at least 15 on 16 stages; raise --global-batch-size to 120'
    >>> in_flags("overlap_exchanges does not go with full recomputation; use recompute none")
    '--overlap-moe-expert-parallel-comm does not go with full recomputation; leave --recompute-granularity out'
    >>> in_flags("tensor 3 does not divide num_attention_heads 16; use 2")
    '--tensor-model-parallel-size 3 does not divide --num-attention-heads 16; use 2'
    >>> in_flags("distributed_optimizer True leaves none; use distributed_optimizer False")
    '--use-distributed-optimizer leaves none; use --no-use-distributed-optimizer'
    >>> in_flags("microbatch -1: give a whole number; use fp8 none")
    '--micro-batch-size -1: give a whole number; leave --fp8-format and --fp8-recipe out'
    """

    def said(found: re.Match[str]) -> str:
        before, field, value = found.groups("")
        is_a_word = "_" not in field and not before and not value  # Of English: the pipeline, a tensor.
        return found[0] if is_a_word else f"{before}{_FLAG_OF[field]}{value}"

    message = message.replace("use recompute none", "leave --recompute-granularity out")
    message = message.replace(f"use fp8 {Fp8.NONE}", "leave --fp8-format and --fp8-recipe out")
    in_words = _FIELD.sub(said, message)
    return _SWITCHED.sub(lambda found: f"--{'no-' * (found[2] == 'False')}{found[1]}", in_words)


def layout_flags(model: Model, layout: Layout) -> list[str]:
    """Flags of ``layout``; the data-parallel size follows from the number of processes.

    The tensor and the pipeline size are among them also where they are 1, to win over those of a script before them.

    >>> model = Model(num_layers=24, hidden_size=1024, num_attention_heads=16, seq_length=512, vocab_size=50257)
    >>> print(*layout_flags(model, Layout(schedule="2bw", pipeline=4, data=2, microbatch=2, global_batch=32))[2:])
    --tensor-model-parallel-size 1 --pipeline-model-parallel-size 4 --micro-batch-size 2 --global-batch-size 32 --bf16
    """
    words = [] if layout.schedule == MEGATRON else ["--pipeline-schedule", layout.schedule]
    usual = _USUAL | {"expert_tensor": layout.tensor}
    for flag, field in {**_COUNTS, "--global-batch-size": "global_batch"}.items():
        if (count := getattr(layout, field)) != usual.get(field, 0):
            words += [flag, str(count)]
    if layout.pipeline_layout:
        words += [PIPELINE_LAYOUT, layout.pipeline_layout]
    elif layout.chunks > 1 and (layout.first_stage_layers or layout.last_stage_layers):
        words += ["--num-virtual-stages-per-pipeline-rank", str(layout.chunks)]
    elif layout.chunks > 1:
        per_chunk = model.num_layers // (layout.pipeline * layout.chunks)
        words += ["--num-layers-per-virtual-pipeline-stage", str(per_chunk)]
    if layout.recompute is not Recompute.NONE:
        words += ["--recompute-granularity", layout.recompute]
    if layout.modules_again not in ((), (RecomputeModule.CORE_ATTN,)):
        words += [MODULES, *layout.modules_again]
    if layout.recompute is Recompute.FULL:
        words += ["--recompute-method", layout.recompute_method, "--recompute-num-layers", str(layout.recompute_layers)]
    if layout.adam_state is not None:
        stored = zip(STORED_IN, layout.adam_state, strict=True)
        words += [PRECISION_AWARE, *(word for pair in stored if pair[1] != "fp32" for word in pair)]
    if layout.fp8 is not Fp8.NONE:
        words += ["--fp8-format", FP8_FORMATS[layout.fp8 in _IN_BLOCKS], "--fp8-recipe", layout.fp8]
    # On Ampere and later; fp32 and attention that is not fused are those of a CPU, too.
    has_grouped = layout.precision is Precision.BF16 and layout.fused_attention
    has_grouped = has_grouped or RecomputeModule.MOE_ACT in layout.modules_again
    switches = {
        _dispatcher_flags(layout.dispatcher): layout.expert > 1,
        GROUPED: model.num_experts > 0 and has_grouped,
        **{flag: getattr(layout, field) for flag, field in _LAYOUT_SWITCHES.items()},
        "--cross-entropy-loss-fusion --cross-entropy-fusion-impl te": layout.fused_loss,
        f"--optimizer {layout.optimizer}": layout.optimizer is not Optimizer.ADAM,
        f"--{layout.precision}": layout.precision is not Precision.FP32,
        "--attention-backend unfused": not layout.fused_attention,
        f"{RECEIVES} {layout.receives}": layout.receives is not Receives.DEFAULT,
        "--no-bias-swiglu-fusion": not layout.fused_swiglu,
        NO_OVERLAP: not layout.overlap_transfers,
        "--clip-grad 0": layout.schedule == "pipedream",
    }
    return [*map(str, words), *(word for switch, on in switches.items() if on for word in switch.split())]
