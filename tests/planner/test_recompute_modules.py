"""Selective recomputation of each module: what it keeps, what it takes, and which flags say so."""

import itertools
import json
from dataclasses import replace
from typing import Any

import pytest

from megatron_2bw.planner.cost import costs
from megatron_2bw.planner.cost.layer import works_of
from megatron_2bw.planner.cost.sizes import Split
from megatron_2bw.planner.cost.speeds import machine_of
from megatron_2bw.planner.errors import PlanError
from megatron_2bw.planner.flags.flags import layout_flags, read
from megatron_2bw.planner.flags.model_flags import model_flags
from megatron_2bw.planner.flags.options import Options
from megatron_2bw.planner.memory import activations, memory
from megatron_2bw.planner.naming import chosen, name
from megatron_2bw.planner.rows.rows import predicted
from megatron_2bw.planner.rules import problem
from megatron_2bw.planner.search.search import search
from megatron_2bw.planner.specs.cluster import CLUSTERS
from megatron_2bw.planner.specs.layout import Dispatcher, Fp8, Layout, Recompute, RecomputeModule
from megatron_2bw.planner.specs.models import MODELS
from megatron_2bw.planner.specs.space import Space

DEEPSEEK, MIB = MODELS["deepseek-v3"], 2**20
MODULES = tuple(RecomputeModule)


def layout(*modules: RecomputeModule, **changes: Any) -> Layout:
    """DeepSeek-V3's, with such ``modules``, or none."""
    usual = {
        "schedule": "megatron",
        "pipeline": 16,
        "data": 64,
        "expert": 64,
        "expert_tensor": 1,
        "global_batch": 1024,
        "distributed_optimizer": True,
        "pipeline_layout": "Etttt|(tttt|)*14tmL",
        "recompute": Recompute.SELECTIVE if modules else Recompute.NONE,
        "recompute_modules": modules,
    }
    return Layout(**usual | changes)


def saved(*modules: RecomputeModule, model=DEEPSEEK, **changes: Any) -> float:
    """MiB per layer and microbatch."""
    whole, less = (activations.of_layer(model, layout(*which, **changes)).kept for which in ((), modules))
    return (whole - less) / MIB


@pytest.mark.parametrize(
    ("module", "mib"),
    [
        ("layernorm", 112),
        ("mla_up_proj", 512 + 16),  # Norms of latent vectors are part of the products today.
        ("shared_experts", 48),
        ("moe_act", 1.1 * 128),  # The busiest rank's.
        ("core_attn", 0),
        ("mlp", 0),
    ],
)
def test_savings_are_those_of_an_estimate_by_others(module: str, mib: float):
    """yanring/Megatron-MoE-ModelZoo@e865051, misc/tools/deepseek_mem_estimate.py: by up_proj+rope recompute and so on.

    Its activation functions, 144 MiB, have 16 of shared experts, which ``moe_act`` leaves alone.
    """
    assert saved(RecomputeModule(module)) == pytest.approx(mib)


def test_a_checkpoint_of_the_experts_keeps_what_the_router_reads():
    of_experts = 1.1 * (3 * 2048 + 7168) * 8 + 3 * 2048
    assert saved(RecomputeModule.MOE) == pytest.approx(4096 * 2 * of_experts / MIB)
    assert saved(RecomputeModule.MOE, RecomputeModule.MOE_ACT, RecomputeModule.SHARED_EXPERTS) == saved(
        RecomputeModule.MOE
    )
    assert saved(RecomputeModule.MOE, RecomputeModule.LAYERNORM) == pytest.approx(saved(RecomputeModule.MOE) + 112)


def test_a_checkpoint_of_an_mlp_keeps_nothing_more_than_the_residual():
    assert saved(RecomputeModule.MLP, model=DEEPSEEK.dense) == pytest.approx(4096 * 2 * (7168 + 3 * 18432) / MIB)
    llama, queries_and_keys = MODELS["llama3-8b"], 8192 * 2 * (4096 + 1024)
    none = {RecomputeModule.MLP, RecomputeModule.MLA_UP_PROJ, RecomputeModule.CORE_ATTN}
    assert saved(*(module for module in MODULES if module not in none), model=llama, expert=1) == 0
    # Attention that stores no scores copies the values, and a checkpoint of it keeps what they are a view of.
    assert saved(RecomputeModule.CORE_ATTN, model=llama, expert=1) == -queries_and_keys / MIB


@pytest.mark.parametrize("fp8", [Fp8.NONE, Fp8.TENSORWISE])
def test_what_is_not_kept_is_alive_in_its_own_backward(fp8: Fp8):
    plain = activations.of_layer(DEEPSEEK, layout(fp8=fp8))
    for module in MODULES:
        less = activations.of_layer(DEEPSEEK, layout(module, fp8=fp8))
        gone = plain.kept - less.kept
        assert gone >= 0
        assert 0 <= less.working - plain.working <= gone
    everything = activations.of_layer(DEEPSEEK, layout(*MODULES, fp8=fp8))
    assert everything.input < everything.kept < plain.kept / 2


def test_seconds_are_those_of_the_modules_alone():
    machine = machine_of(CLUSTERS["dgx-h100"])

    def again_s(*modules: RecomputeModule, kind: str = "layer") -> float:
        return getattr(works_of(DEEPSEEK, Split.of(layout(*modules)), machine), kind).again_s

    forward_s = works_of(DEEPSEEK, Split.of(layout()), machine).layer.forward_s
    single = {module: again_s(module) for module in MODULES}
    assert single[RecomputeModule.MLP] == 0 < again_s(RecomputeModule.MLP, kind="dense")
    assert single[RecomputeModule.LAYERNORM] < single[RecomputeModule.MOE_ACT] < single[RecomputeModule.MLA_UP_PROJ]
    assert single[RecomputeModule.MLA_UP_PROJ] < single[RecomputeModule.MOE] < forward_s
    for one, other in itertools.combinations((m for m in MODULES if m is not RecomputeModule.MOE), 2):
        # Apart, each waits for its launches; together, one has its kernels while the other's are launched.
        assert again_s(one, other) <= single[one] + single[other] + 1e-12
    assert again_s(*MODULES) < forward_s
    full = replace(layout(), recompute=Recompute.FULL)
    assert works_of(DEEPSEEK, Split.of(full), machine).layer.again_s == forward_s


def test_a_batch_takes_longer_and_less_memory_with_each_module_more():
    cluster = replace(CLUSTERS["dgx-h100"], nodes=128)
    ladder = [MODULES[:count] for count in range(len(MODULES) + 1)]
    times = [costs.iteration(DEEPSEEK, layout(*modules), cluster).time_s for modules in ladder]
    sizes = [memory.largest(DEEPSEEK, layout(*modules)).total_bytes for modules in ladder]
    assert times == sorted(times)
    assert sizes == sorted(sizes, reverse=True)


def test_flags_say_which_and_are_read_back():
    one = layout(RecomputeModule.MLA_UP_PROJ, RecomputeModule.MOE_ACT)
    words = [*model_flags(DEEPSEEK), "--vocab-size", "129280", *layout_flags(DEEPSEEK, one)]
    assert "--recompute-granularity selective --recompute-modules mla_up_proj moe_act" in " ".join(words)
    assert read(Options.parse(words), gpus=one.gpus).layout == replace(one, schedule="megatron")
    usual = layout(RecomputeModule.CORE_ATTN)
    assert "--recompute-modules" not in layout_flags(DEEPSEEK, usual)
    assert ",mla_up_proj+moe_act," in name(one)
    assert chosen(name(one))["recompute_modules"] == one.recompute_modules
    assert "selective" in name(usual)


LLAMA = (
    "--num-layers 8 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 --max-position-embeddings 1024 "
    "--vocab-size 50257 --micro-batch-size 1 --bf16 --swiglu --disable-bias-linear"
)
EXPERTS = f"{LLAMA} --num-experts 8 --moe-grouped-gemm"


@pytest.mark.parametrize(
    ("flags", "modules"),
    [
        ("--recompute-activations", ("core_attn",)),
        ("--recompute-granularity selective --recompute-modules moe_act layernorm", ("layernorm", "moe_act")),
        ("--recompute-granularity selective --recompute-modules", ()),
        ("--recompute-modules layernorm", ()),
        ("--moe-layer-recompute", ("core_attn", "moe")),
        ("--moe-layer-recompute --recompute-modules layernorm", ("layernorm", "moe")),
        ("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1", ()),
    ],
)
def test_flags_of_megatron(flags: str, modules: tuple[str, ...]):
    found = read(Options.parse(f"{EXPERTS} {flags}".split()), gpus=8)
    assert found.layout.modules_again == modules
    usual = read(Options.parse(EXPERTS.split()), gpus=8).notes
    assert {note.partition(":")[0] for note in set(found.notes) - set(usual)} == (
        {"--recompute-modules"} if flags == "--recompute-modules layernorm" else set()
    )


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--recompute-modules mhc", "--recompute-modules 'mhc': choose one of core_attn, "),
        ("--recompute-modules mla_up_proj", "recompute_modules mla_up_proj: the model has no latent vectors; leave it"),
        (
            "--recompute-modules shared_experts --moe-shared-expert-overlap --moe-shared-expert-intermediate-size 64",
            "shared_experts and --moe-shared-expert",
        ),
        (
            "--recompute-modules moe_act --fp8-format hybrid",
            "recompute_modules moe_act does not go with fp8 delayed; use fp8 tensorwise",
        ),
        (
            "--recompute-modules moe --overlap-moe-expert-parallel-comm --expert-model-parallel-size 2 "
            "--moe-token-dispatcher-type alltoall",
            "overlap_exchanges does not go with recompute_modules moe; use moe_act",
        ),
    ],
)
def test_what_megatron_refuses(flags: str, message: str):
    words = f"{EXPERTS} --recompute-granularity selective {flags}".split()
    with pytest.raises(PlanError, match=message.replace("(", r"\(")):
        read(Options.parse(words), gpus=8)


def test_more_that_megatron_refuses():
    selective = "--recompute-granularity selective --recompute-modules moe_act"
    message = "moe_act needs --moe-grouped-gemm of a model with experts; give it, or leave moe_act out"
    with pytest.raises(PlanError, match=message):
        read(Options.parse(f"{LLAMA} --num-experts 8 {selective}".split()), gpus=8)
    full = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    with pytest.raises(PlanError, match="--moe-layer-recompute and --recompute-granularity full exclude each other"):
        read(Options.parse(f"{EXPERTS} {full} --moe-layer-recompute".split()), gpus=8)


@pytest.mark.parametrize(
    "said",
    [
        {"recompute": "selective", "recompute_modules": ["moe_act", "mla_up_proj"]},
        {"recompute_granularity": "selective", "recompute_modules": ["mla_up_proj", "moe_act"], "moe_grouped_gemm": 1},
    ],
    ids=["ours", "megatrons"],
)
def test_rows(said: dict[str, Any]):
    row = {"model": "deepseek-v3", "cluster": "dgx-h100", "gpus": 1024, "pp": 16, "ep": 64, "etp": 1, "gbs": 1024}
    row |= {"mbs": 1, "pipeline_model_parallel_layout": "Etttt|(tttt|)*14tmL", "use_distributed_optimizer": True}
    plain, less = predicted(row), predicted(row | json.loads(json.dumps(said)))
    assert less["stages"][0]["activations_bytes"] < plain["stages"][0]["activations_bytes"]
    assert less["time_s"] > plain["time_s"]
    of_attention = predicted(row | {"recompute_granularity": None, "recompute_modules": ["core_attn"]})
    assert of_attention == plain


def test_a_search_takes_the_modules_that_it_is_given():
    cluster = replace(CLUSTERS["dgx-h100"], nodes=4)
    model = replace(DEEPSEEK, name="", num_layers=8, num_experts=32, mtp_num_layers=0)
    modules = (RecomputeModule.MLA_UP_PROJ, RecomputeModule.MOE_ACT)
    fixed = {"pipelines": (2,), "tensors": (1,), "experts": (16,), "microbatches": (4,), "schedules": ("megatron",)}
    space = Space(**fixed, recompute_modules=(modules,))
    choices = search(model, cluster, 256, space).choices
    found = {choice.layout.modules_again for choice in choices}
    assert found <= {(), modules}
    only = search(model, cluster, 256, replace(space, recomputes=(Recompute.SELECTIVE,))).best.layout
    assert only.modules_again == modules
    assert problem(model, only) is None
    with pytest.raises(PlanError, match="mla_up_proj: the model has no latent vectors"):
        search(MODELS["llama3-8b"], cluster, 256, Space(recompute_modules=(modules,)))


def test_dispatchers_that_overlap_take_no_checkpoint_of_the_experts():
    chunked = {"chunks": 4, "pipeline": 4, "data": 64, "dispatcher": Dispatcher.DEEPEP, "overlap_exchanges": True}
    refused = problem(DEEPSEEK, layout(RecomputeModule.MOE, **chunked))
    assert str(refused) == "overlap_exchanges does not go with recompute_modules moe; use moe_act"
    assert problem(DEEPSEEK, layout(RecomputeModule.MOE_ACT, **chunked)) is None


def test_nothing_beats_the_best_set_where_first_layers_have_no_experts():
    """On every base, whichever stage is the slowest: of all sets of modules, those of Megatron's own rules."""
    model = replace(MODELS["deepseek-v2-lite"], name="", num_layers=12)
    sizes = {"pipeline": 4, "data": 2, "expert": 2, "expert_tensor": 1, "global_batch": 64, "microbatch": 8}
    base = Layout(schedule="1f1b-flush", **sizes, distributed_optimizer=True, overlap_gradients=True)
    fixed = {"schedules": ("1f1b-flush",), "pipelines": (4,), "widths": (2,), "microbatches": (8,), "experts": (2,)}
    space = Space(**fixed, tensors=(1,), recomputes=(Recompute.SELECTIVE,), first_stage_layers=(0,))
    space = replace(space, last_stage_layers=(0,), distributed_optimizer=(True,))
    sets = itertools.chain.from_iterable(itertools.combinations(MODULES, count) for count in range(1, 8))
    layouts = [replace(base, recompute=Recompute.SELECTIVE, recompute_modules=modules) for modules in sets]
    found = 0
    for memory_gb in range(20, 80, 3):
        node = replace(CLUSTERS["dgx-h100"], gpus_per_node=8)
        cluster = replace(node, gpu=replace(node.gpu, memory_gb=memory_gb))
        times = [
            costs.iteration(model, one, cluster).time_s
            for one in layouts
            if problem(model, one) is None and memory.largest(model, one).total_bytes <= cluster.memory_bytes
        ]
        if not times:
            continue
        best = search(model, cluster, 64, space).best
        assert best.iteration.time_s == pytest.approx(min(times), rel=1e-12)
        found += min(times) > min(costs.iteration(model, one, cluster).time_s for one in layouts)
    assert found > 3, "the fastest set has to be too large for some"


def test_a_gpu_without_products_of_several_experts_in_one():
    v100s = replace(CLUSTERS["p3.16xlarge"], nodes=16)
    best = search(MODELS["mixtral-8x7b"], v100s, 128, Space(schedules=("1f1b-flush",))).choices
    assert all(RecomputeModule.MOE_ACT not in choice.layout.modules_again for choice in best)
    with pytest.raises(PlanError, match="recompute_modules moe_act: v100-16gb has no products of several experts"):
        search(MODELS["mixtral-8x7b"], v100s, 128, Space(recompute_modules=((RecomputeModule.MOE_ACT,),)))
