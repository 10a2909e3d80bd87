"""Settings drawn at random: features beside each other as nobody thought of putting them."""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass, replace

from .case import Case, Fault
from .faults import INFINITE_GRADIENT
from .features import (
    ALL_TO_ALL,
    BIASED,
    DETACHED,
    EXPERTS,
    GLOBALLY_BALANCED,
    IN_BF16,
    LATENT,
    LLAMA,
    PER_TOKEN,
    SEVERAL_TOKENS,
)
from .saved import ASYNCHRONOUS, DROPOUT

_SPREAD = {
    2: [(), (), (), tuple("--decoder-first-pipeline-num-layers 1 --decoder-last-pipeline-num-layers 3".split())],
    3: [("--pipeline-model-parallel-layout", layout) for layout in ("Et|ttt|L", "Et|tt|tL", "Ett|t|tL")],
    4: [()],
}
"""By the number of stages: what says how layers are spread over them."""
_OF_MATRICES = ("muon", "soap", "lion")
_EXPERTS = (EXPERTS, BIASED, GLOBALLY_BALANCED, ALL_TO_ALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopped:
    """A setting, and two batches after which it is stopped: what goes on after the first one is stopped again."""

    case: Case
    format: str
    flags: tuple[str, ...]
    """Of the runs that save."""
    after: tuple[int, int]


_PLAIN = Case(schedule="2bw", stages=0, microbatches=0, record_gradients=True)


def words(case: Case, plain: Case = _PLAIN) -> str:
    """What ``case`` has that a plain one does not."""
    given = {name: value for name, value in asdict(case).items() if value != getattr(plain, name)}
    texts = {name: " ".join(map(str, value)) if isinstance(value, tuple) else value for name, value in given.items()}
    return " ".join(f"{name}={text}" for name, text in texts.items())


def stopped(seed: str) -> Stopped:
    """The setting of `drawn` with what a checkpoint has to carry beside weights: no oracle has to follow it."""
    case, draw = drawn(seed), random.Random(f"stopped {seed}")
    if len(case.spans()) < 3:  # To be stopped after two of them.
        case = replace(case, steps=(), skipped=())
    if case.optimizer == "soap":  # Megatron saves it in no format if it is sharded.
        case = replace(case, distributed_optimizer=False)
    has_experts = "--num-experts" in case.model
    of_layers = case.optimizer in _OF_MATRICES
    model = case.model
    if "--mtp-num-layers" not in model and draw.random() < 0.6:
        model += DROPOUT
    if has_experts and case.tensor_parallel == 1 and draw.random() < 0.3:
        model += ("--moe-input-jitter-eps", "0.01")
    shares = has_experts and case.replicas == 2 and not case.expert_tensor_parallel and not of_layers
    flags = case.flags
    if draw.random() < 0.4:
        flags += ("--eval-interval", str(draw.choice([1, 2, 3])), "--eval-iters", "1")
    if draw.random() < 0.3:
        flags += ("--dataloader-type", "cyclic")
    # Mostly in one that Megatron can save it in; see ``planner.flag_table.refused``.
    format_ = draw.choice(["torch", "torch_dist", "torch_dist"])
    if case.offloaded or case.moments or (of_layers and case.distributed_optimizer):
        format_ = "torch_dist"
    elif case.optimizer == "soap" or ("--mtp-num-layers" in model and case.tied) or "decoder.layers.0." in case.frozen:
        format_ = "torch"
    case = replace(
        case,
        model=model,
        flags=flags,
        expert_parallel=2 if shares and draw.random() < 0.6 else 1,
        record_gradients=False,
    )
    first, second = sorted(draw.sample(case.ends()[:-1], 2))
    is_asynchronous = format_ == "torch_dist" and draw.random() < 0.3
    return Stopped(case=case, format=format_, flags=ASYNCHRONOUS if is_asynchronous else (), after=(first, second))


def drawn(seed: str) -> Case:
    """A setting of 2BW that Megatron and we take, and that the oracle follows to the last bit: experts stay whole."""
    draw = random.Random(seed)
    stages = draw.choice([2, 2, 2, 3, 4])
    tensor = draw.choice([1, 1, 2])
    replicas = draw.choice([1, 2]) if stages * tensor * 2 <= 6 else 1
    kind = draw.choice(["gpt"] * 5 + ["bert"])
    model, experts = _gpt(draw, further_tokens=stages != 3) if kind == "gpt" else ((), ())
    split = 1 if experts and tensor > 1 and draw.random() < 0.4 else 0
    flags, counts, least = _order(draw, stages)
    optimizer = _optimizer(draw, may_shard_layers=not split or replicas > 1)
    shards_adam = optimizer["distributed_optimizer"] and optimizer["optimizer"] == "adam"
    model += draw.choice([(), (), PER_TOKEN])
    model += IN_BF16 if optimizer["precision"] == "bf16" and draw.random() < 0.3 else ()
    if draw.random() < 0.25:
        flags += ("--overlap-grad-reduce", *["--overlap-param-gather"] * optimizer["distributed_optimizer"])
    case = Case(
        schedule="2bw",
        kind=kind,
        stages=stages,
        layers=4,
        replicas=replicas,
        batches=draw.choice([8, 12]),
        tied=draw.random() < 0.5,
        clip=draw.choice([0.0, 0.5, 1.0, 1.0]),
        # What the oracle shows routers of the replicas' tokens it shows once per microbatch.
        recompute="no"
        if replicas > 1 and experts == GLOBALLY_BALANCED and "--mtp-num-layers" in model
        else draw.choice(["no", "no", "selective", "full"]),
        tensor_parallel=tensor,
        sequence_parallel=tensor > 1 and kind == "gpt" and (bool(experts) or draw.random() < 0.5),
        expert_tensor_parallel=split,
        synchronous=draw.choice([0, 0, 0, 1, 3, 5]),
        fused_gradients=draw.random() < 0.25,
        model=model + experts,
        flags=flags + draw.choice(_SPREAD[stages]),
        record_gradients=True,
        # Of sums over four ranks no oracle knows the order; experts are divided among its ranks, too.
        context_parallel=draw.choice([1, 2, 2])
        if kind == "gpt" and replicas == 1 and stages * tensor <= 4 and not experts and "--mtp-num-layers" not in model
        else 1,
        **counts,
        **optimizer,
        # Last, so that what else a seed draws stays the same.
        instances=draw.choice([1, replicas]) if shards_adam else 1,
        moments=draw.choice(["", "fp32", "bf16"])
        if shards_adam and optimizer["precision"] != "fp32" and not optimizer["lead"]
        else "",
    )
    if case.moments == "fp32":
        case = replace(case, moments="", offloaded=draw.choice([0.0, 0.3, 1.0]))
    if "--mtp-num-layers" in model and draw.random() < 0.5:
        case = replace(case, model=(*case.model, *DETACHED))
    if kind == "gpt" and not (shards_adam and case.precision != "fp32") and (tensor == 1 or set(LATENT) <= set(model)):
        case = replace(case, clip_attention=draw.choice([0.0, 0.0, 0.05, 0.3]))
    case = _less_usual(case, draw, least)
    late = () if experts or draw.random() < 0.5 else ("--pipeline-receives", "late")  # The order that GPUs have.
    return replace(case, flags=case.flags + late)


def _less_usual(case: Case, draw: random.Random, least: int) -> Case:
    """Batches of ``least`` microbatches or more that change or are skipped, frozen weights, gradients that overflow."""
    if draw.random() < 0.3:
        sizes = sorted(draw.sample(range(least, least + 5), draw.randint(1, 4)))  # They only grow.
        steps = tuple((draw.randint(1, 4), microbatches) for microbatches in sizes)
        count = sum(batches for batches, _ in steps)
        # Megatron passes a skipped batch on to other ranks as that of its own GPT.
        may_skip = count > 4 and case.kind == "gpt" and case.tensor_parallel == 1
        skipped = draw.sample(range(count), draw.choice([0, 0, 1, 3]) if may_skip else 0)
        delayed = min(case.delayed, sizes[-1])
        case = replace(case, steps=steps, skipped=tuple(sorted(skipped)), delayed=delayed)
    if case.kind == "gpt" and "--mtp-num-layers" not in case.model and draw.random() < 0.2:
        embedding = ("embedding.", "output_layer.") if case.tied else ("embedding.",)
        frozen = draw.choice([embedding, ("decoder.layers.0.",), (*embedding, "decoder.layers.0.")])
        is_refused = case.recompute == "full" and "embedding." in frozen
        return replace(case, frozen=frozen, recompute="no" if is_refused else case.recompute)
    if case.precision == "fp16" and not case.tied and not case.steps and draw.random() < 0.8:
        calls = draw.sample(range(case.batches * case.microbatches), 2)
        rank = draw.randrange(case.ranks)
        return replace(case, faults=tuple(Fault(kind=INFINITE_GRADIENT, rank=rank, call=call) for call in calls))
    return case


def _gpt(draw: random.Random, *, further_tokens: bool) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Flags of a model, and of its experts."""
    model = draw.choice([(), (), LLAMA, LATENT, ("--swiglu",), ("--position-embedding-type", "rope")])
    if further_tokens and model != LATENT and draw.random() < 0.15:
        model += tuple(word for word in SEVERAL_TOKENS if word not in ("--position-embedding-type", "rope"))
        model += () if "--position-embedding-type" in model else ("--position-embedding-type", "rope")
    return model, draw.choice([(), (), (), *_EXPERTS])


def _order(draw: random.Random, stages: int) -> tuple[tuple[str, ...], dict[str, int], int]:
    """Flags, numbers of microbatches and the least there may be of them: what decides on the order of a batch."""
    extra = draw.choice([0, 0, 0, 1, 2])
    least = (1 + extra) * (stages - 1)
    microbatches = draw.randint(least, max(least, 6))
    delayed = draw.randint(least, microbatches) if draw.random() < 0.35 and microbatches > least else 0
    flags = ("--pipeline-extra-in-flight", str(extra)) if extra else ()
    flags += ("--pipeline-gradient-buffers", "1") if draw.random() < 0.25 else ()
    return flags, {"microbatches": microbatches, "delayed": delayed}, least


def _optimizer(draw: random.Random, *, may_shard_layers: bool) -> dict[str, object]:
    """Optimizer, precision and correction that go together; see ``planner.flag_table.refused``."""
    optimizer = draw.choice(["adam", "adam", "adam", "muon", "lion", "soap", "sgd"])
    of_layers = optimizer in _OF_MATRICES
    precision = draw.choice(["fp32", "bf16", "bf16"] if of_layers else ["fp32", "bf16", "bf16", "fp16"])
    may_shard = (may_shard_layers and precision == "bf16") if of_layers else optimizer == "adam"
    corrections = [*["lead"] * (optimizer not in ("lion", "soap")), *["update-lead"] * (precision != "fp32")]
    leads = [0.0, 0.0, 0.5, 1.0, 2.0] if corrections else [0.0]
    return {
        "optimizer": optimizer,
        "precision": precision,
        "distributed_optimizer": may_shard and draw.random() < 0.5,
        "lead": draw.choice(leads),
        "correction": draw.choice(corrections or ["lead"]),
    }
