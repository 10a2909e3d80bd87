"""Every set of flags that the planner prints passes Megatron's own validation, up to the TransformerConfig."""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import product
from typing import Any

import pytest

from megatron_2bw.mcore.loop.arguments import add_arguments
from megatron_2bw.mcore.loop.checks import validated
from megatron_2bw.mcore.symbols import megatron_version
from megatron_2bw.planner.cost.costs import PRICED
from megatron_2bw.planner.errors import PlanError
from megatron_2bw.planner.flags.accepted import OPTIMIZERS, SETTINGS
from megatron_2bw.planner.flags.argument_flags import NEGATED, flag_of
from megatron_2bw.planner.flags.flags import layout_flags, read
from megatron_2bw.planner.flags.model_flags import MODEL_SWITCHES, model_flags, read_model
from megatron_2bw.planner.flags.names import MEGATRONS, OURS
from megatron_2bw.planner.flags.options import Options
from megatron_2bw.planner.flags.unpriced import CHECKED
from megatron_2bw.planner.naming import name
from megatron_2bw.planner.report.report import prediction_json
from megatron_2bw.planner.rows.rows import predicted
from megatron_2bw.planner.rules import MEGATRON, needs_megatron_0_19, problem
from megatron_2bw.planner.search.finder import price
from megatron_2bw.planner.search.search import search
from megatron_2bw.planner.specs.cluster import CLUSTERS
from megatron_2bw.planner.specs.inputs import sized
from megatron_2bw.planner.specs.layout import Fp8, Layout, Optimizer, Precision, Recompute, RecomputeMethod
from megatron_2bw.planner.specs.model import Model
from megatron_2bw.planner.specs.models import MODELS
from megatron_2bw.planner.specs.space import Space

TRAINING = (
    "--train-iters 10 --lr 1e-4 --mock-data --tokenizer-type NullTokenizer --vocab-size 1000 --rerun-mode disabled "
    "--no-rope-fusion"
).split()
"""What the planner leaves to the user; rotary positions are fused only where Transformer Engine is installed."""

SMALL = Model(num_layers=16, hidden_size=512, num_attention_heads=8, seq_length=128, vocab_size=1000)
MODEL_CASES: dict[str, Model] = {
    "gpt": SMALL,
    "gqa": dataclasses.replace(
        MODELS["llama3-8b"],
        num_layers=16,
        hidden_size=1024,
        num_attention_heads=16,
        ffn_hidden_size=2048,
        kv_channels=64,
        qk_layernorm=True,
    ),
    "channels": dataclasses.replace(SMALL, kv_channels=32),
    "experts": dataclasses.replace(SMALL, num_experts=4, tied=False, bias=False),
    "one expert of four": dataclasses.replace(SMALL, num_experts=4, moe_router_topk=1, bias=False),
    "odd layers": dataclasses.replace(SMALL, num_layers=15),
    "several tokens": dataclasses.replace(SMALL, mtp_num_layers=2, learned_positions=False, tied=False),
    "deepseek": dataclasses.replace(
        MODELS["deepseek-v3"],
        num_layers=16,
        hidden_size=512,
        num_attention_heads=8,
        kv_channels=64,
        num_query_groups=8,
        num_experts=4,
        moe_router_topk=2,
        dense_layers=2,
        dense_ffn_hidden_size=1536,
        ffn_hidden_size=256,
        moe_shared_expert_intermediate_size=512,
        q_lora_rank=96,
        kv_lora_rank=64,
    ),
}
SPACES: dict[str, Space] = {
    "any": Space(),
    "2bw": Space(schedules=("2bw",)),
    "2bw, tight": Space(schedules=("2bw",), tight=True, gradient_buffers=(1,)),
    "flush": Space(schedules=("1f1b-flush", "gpipe")),
    "megatron": Space(schedules=("megatron",)),
    "interleaved": Space(schedules=("megatron",), pipelines=(2, 3, 4), chunks=(2, 3, 4, 5, 6)),
    "stages that cannot be equal": Space(pipelines=(6,)),
    "both ways": Space(schedules=("gems", "chimera", "mixpipe")),
    "pipedream": Space(schedules=("pipedream",)),
    "in 8 bits": Space(fp8=Fp8.DELAYED),
    "full": Space(recomputes=(Recompute.FULL,)),
    "selective": Space(recomputes=(Recompute.SELECTIVE,)),
    "without sequence parallelism": Space(tensors=(2, 4), sequence_parallel=(False,)),
    "without the distributed optimizer": Space(distributed_optimizer=(False,)),
    "shared sequences": Space(contexts=(2, 4)),
    "shared experts": Space(experts=(2, 4)),
    "shared experts, not split": Space(experts=(2, 4), tensors=(2,), expert_tensors=(1,)),
    "whole experts": Space(experts=(1,), tensors=(2,), expert_tensors=(1,)),
    "muon": Space(optimizer=Optimizer.MUON),
    "lion": Space(optimizer=Optimizer.LION, schedules=("2bw", "megatron")),
    "settings": Space(settings=tuple(SETTINGS.values())),
    "settings in 8 bits": Space(settings=tuple(SETTINGS.values()), fp8=Fp8.DELAYED, schedules=("megatron",)),
    "experts split over replicas": Space(experts=(1,), tensors=(1,), expert_tensors=(2,)),
}


NOTHING = {
    *((model, "without sequence parallelism") for model, made in MODEL_CASES.items() if made.num_experts),
    *((model, "both ways") for model, made in MODEL_CASES.items() if made.num_experts or made.mtp_num_layers),
    *((model, "pipedream") for model, made in MODEL_CASES.items() if made.tied or made.mtp_num_layers),
    *(
        (model, space)
        for model, made in MODEL_CASES.items()
        for space in ("shared experts", "shared experts, not split")
        if not made.num_experts
    ),
}
"""Pairs of a model and a space that have no layout."""


@pytest.fixture(scope="module")
def parser() -> argparse.ArgumentParser:
    """Megatron's, with our group."""
    from megatron.training.arguments import add_megatron_arguments

    return add_arguments(add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False)))


Validate = Callable[[Model, Layout], tuple[Any, Any]]


Accept = Callable[[list[str], int], argparse.Namespace]


@pytest.fixture
def accept(parser: argparse.ArgumentParser, monkeypatch: pytest.MonkeyPatch) -> Accept:
    """Megatron's arguments for some flags on so many GPUs, on Hopper."""
    from megatron.training import arguments

    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    monkeypatch.setattr(arguments, "get_device_arch_version", lambda: 9)
    monkeypatch.setattr(arguments.torch.cuda, "get_device_capability", lambda: (9, 0))
    # Experts in 8 bits need Transformer Engine.
    monkeypatch.setattr("megatron.core.transformer.transformer_config.is_te_min_version", lambda *version: True)

    monkeypatch.setattr("megatron_2bw.mcore.cpu.backend.needed", lambda: False)
    monkeypatch.setattr(arguments, "_print_args", lambda title, args: None)  # Takes longer than all else.

    def with_flags(words: list[str], gpus: int) -> argparse.Namespace:
        args = parser.parse_args([*words, *TRAINING])
        args.world_size, args.rank = gpus, 1  # Rank 0 prints.
        validated(args, lambda: arguments.validate_args(args))
        return args

    return with_flags


@pytest.fixture
def validate(accept: Accept) -> Validate:
    """Megatron's arguments and TransformerConfig for the flags of a layout."""
    from megatron.training import arguments

    def with_flags_of(model: Model, layout: Layout) -> tuple[Any, Any]:
        args = accept([*layout_flags(model, layout), *model_flags(model)], layout.gpus)
        return args, arguments.core_transformer_config_from_args(args)

    return with_flags_of


def planned(model: Model, space: Space) -> set[Layout]:
    """What ``plan`` would print for several clusters and batches, a few layouts each."""
    layouts = set()
    for cluster, gpus, batch in (("dgx-a100", 16, 16), ("p3.16xlarge", 8, 16), ("dgx-h100", 6, 96)):
        with suppress(PlanError):
            plan = search(model, sized(CLUSTERS[cluster], gpus=gpus), batch, space, keep=3)
            layouts.update(choice.layout for choice in plan.choices)
    return layouts


def refused_on_this_megatron(layout: Layout) -> bool:
    """By us, as a plan says; see ``planner.flag_table.refused``."""
    return layout.schedule != MEGATRON and needs_megatron_0_19(layout) and megatron_version().startswith("0.18.")


def _pairs() -> Iterator[Any]:
    """Of models and spaces; four of five are slow, and every model and every space has layouts in some that are not."""
    pairs = sorted(product(MODEL_CASES, SPACES), key=lambda pair: (pair in NOTHING, pair[1]))
    for index, pair in enumerate(pairs):
        yield pytest.param(*pair, marks=[pytest.mark.slow] if index % 5 != 2 else [])


@pytest.mark.parametrize(("model", "space"), _pairs())
def test_megatron_accepts_what_is_printed(model: str, space: str, validate: Validate):
    layouts = planned(MODEL_CASES[model], SPACES[space])
    assert bool(layouts) != ((model, space) in NOTHING)
    for layout in layouts:
        if refused_on_this_megatron(layout):
            with pytest.raises(SystemExit):
                validate(MODEL_CASES[model], layout)
            continue
        args, config = validate(MODEL_CASES[model], layout)
        assert args.data_parallel_size == layout.data, name(layout)
        assert args.global_batch_size // (args.micro_batch_size * args.data_parallel_size) == layout.microbatches
        assert (config.tensor_model_parallel_size, config.pipeline_model_parallel_size) == (
            layout.tensor,
            layout.pipeline,
        )
        shares = config.context_parallel_size, config.expert_model_parallel_size, config.expert_tensor_parallel_size
        assert shares == (layout.context, layout.expert, layout.expert_tensor)
        ends = config.num_layers_in_first_pipeline_stage, config.num_layers_in_last_pipeline_stage
        assert ends == (layout.first_stage_layers or None, layout.last_stage_layers or None)
        assert (space == "stages that cannot be equal") <= (any(ends) or layout.pipeline_layout != "")
        assert (config.virtual_pipeline_model_parallel_size or 1) == layout.chunks
        assert (config.recompute_granularity or "none") == layout.recompute
        assert config.sequence_parallel == layout.sequence_parallel
        assert (config.fp16, config.bf16) == (layout.precision == "fp16", layout.precision == "bf16")
        by_layers = args.use_layer_wise_distributed_optimizer  # Of others than Adam and SGD.
        assert (args.use_distributed_optimizer or by_layers) == layout.distributed_optimizer
        assert args.optimizer == layout.optimizer


LIMITS: dict[str, tuple[object, ...]] = {
    "schedules": PRICED,
    "pipelines": (1, 2, 3, 4, 8),
    "widths": (1, 2, 3, 4, 8),
    "tensors": (1, 2, 3, 4, 8),
    "contexts": (1, 2, 4),
    "experts": (1, 2, 4),
    "expert_tensors": (1, 2, 4),
    "microbatches": (1, 2, 3, 4, 8),
    "chunks": (1, 2, 3, 4),
    "first_stage_layers": (0, 1, 2, 3, 4, 8, 16),
    "last_stage_layers": (0, 1, 2, 3, 4, 8, 16),
    "recomputes": tuple(Recompute),
    "recompute_methods": tuple(RecomputeMethod),
    "recompute_layers": (1, 2, 3, 5),
    "sequence_parallel": (True, False),
    "distributed_optimizer": (True, False),
    "extra_in_flight": (0, 1, 2),
    "delayed_microbatches": (0, 1, 2, 4, 8),
    "mixpipe_k": (0, 2, 4),
    "mixpipe_gamma": (0, 1, 2),
    "gradient_buffers": (1, 2),
    "settings": tuple(SETTINGS.values()),
}


@pytest.mark.parametrize("sets", [6, pytest.param(50, marks=pytest.mark.slow)])
@pytest.mark.parametrize("model", MODEL_CASES)
def test_megatron_accepts_what_is_printed_under_any_limits(model: str, sets: int, validate: Validate):
    """Limits that a search would not choose by itself: random sets of up to five."""
    chosen, found = random.Random(model), 0
    for _ in range(sets):
        limited = chosen.sample(sorted(LIMITS), chosen.randint(1, 5))
        values = {limit: tuple(chosen.sample(LIMITS[limit], chosen.randint(1, 2))) for limit in limited}
        space = Space(**values, precision=chosen.choice([None, *Precision]), tight=chosen.random() < 0.3)
        cluster, gpus = chosen.choice([("dgx-a100", 16), ("p3.16xlarge", 8), ("dgx-h100", 6), ("dgx-h100", 16)])
        with suppress(PlanError):
            plan = search(MODEL_CASES[model], sized(CLUSTERS[cluster], gpus=gpus), chosen.choice((8, 12, 96)), space)
            for choice in plan.choices[:3]:
                if refused_on_this_megatron(choice.layout):
                    continue
                args, config = validate(MODEL_CASES[model], choice.layout)
                assert args.data_parallel_size == choice.layout.data, (name(choice.layout), space)
                assert config.pipeline_model_parallel_size == choice.layout.pipeline
                found += 1
    assert found > 0.8 * sets


@pytest.mark.parametrize("model", MODEL_CASES)
def test_megatron_builds_the_same_model(model: str, validate: Validate):
    expected = MODEL_CASES[model]
    args, config = validate(expected, Layout(schedule="megatron", pipeline=1, data=1, global_batch=1))
    assert (config.num_layers, config.hidden_size, config.ffn_hidden_size, config.kv_channels) == (
        expected.num_layers,
        expected.hidden_size,
        expected.dense_ffn_hidden_size or expected.ffn_hidden_size,
        expected.kv_channels,
    )
    if expected.num_experts:
        assert config.moe_ffn_hidden_size == expected.ffn_hidden_size
    assert (config.moe_shared_expert_intermediate_size or 0) == expected.moe_shared_expert_intermediate_size
    assert (config.mtp_num_layers or 0) == expected.mtp_num_layers
    if expected.dense_layers:
        assert config.moe_layer_freq == [0] * expected.dense_layers + [1] * (16 - expected.dense_layers)
    assert config.multi_latent_attention == expected.multi_latent_attention
    assert config.qk_layernorm == expected.qk_layernorm
    if expected.multi_latent_attention:
        for name in ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"):
            assert getattr(config, name) == getattr(expected, name), name
    assert (config.num_attention_heads, config.num_query_groups) == (
        expected.num_attention_heads,
        expected.num_query_groups,
    )
    assert (config.num_moe_experts or 0) == expected.num_experts
    assert config.add_bias_linear == expected.bias
    assert config.gated_linear_unit == expected.swiglu
    assert (config.hidden_dropout > 0) == expected.dropout
    assert args.untie_embeddings_and_output_weights != expected.tied
    assert (args.position_embedding_type == "learned_absolute") == expected.learned_positions
    assert (args.seq_length, args.max_position_embeddings) == (expected.seq_length, expected.seq_length)


GIVEN = "--num-layers 16 --hidden-size 512 --num-attention-heads 8 --max-position-embeddings 128"
ALONE = Layout(schedule="megatron", pipeline=1, data=1, global_batch=1, precision="bf16")
SWITCHES = (
    *sorted(MODEL_SWITCHES),
    *(
        "--num-experts 4",
        "--moe-router-topk 1",
        "--position-embedding-type rope",
        "--rope-type rope",
        "--rope-type yarn",
    ),
    *("--mtp-num-layers 1", "--moe-router-score-function sigmoid", "--moe-router-num-groups 3"),
    *("--moe-router-group-topk 2", "--moe-shared-expert-intermediate-size 64", "--moe-layer-freq [0]*2+[1]*14"),
)

NEEDS = {
    "--squared-relu": "--no-bias-gelu-fusion",
    "--rope-type yarn": "--multi-latent-attention",
    "--mtp-num-layers 1": "--position-embedding-type rope",
    "--moe-router-topk 1": "--num-experts 4 --moe-router-pre-softmax",
    "--moe-router-enable-expert-bias": "--num-experts 4 --moe-router-score-function sigmoid",
    "--moe-router-group-topk 2": "--num-experts 4 --moe-router-topk 2 --moe-router-num-groups 2",
}
"""Without which the planner takes a switch with few others, if any."""


@pytest.mark.parametrize("switch", SWITCHES)
def test_model_flags_as_given_are_accepted_here_too(switch: str, validate: Validate):
    """Each with every other one, if the planner takes both."""
    accepted = 0
    for other in SWITCHES:
        words = f"{GIVEN} --seq-length 128 --vocab-size 1000 {NEEDS.get(switch, '')} {switch} {other}".split()
        try:
            model = read_model(Options.parse(words))
        except PlanError:
            continue
        validate(model, ALONE)
        accepted += 1
    assert accepted > len(SWITCHES) / 2


@pytest.mark.parametrize(
    ("more", "refused"),
    [
        ("--seq-length 128 --squared-relu", "activation function should be either gelu, swiglu, or quick_geglu"),
        ("--seq-length 128 --swiglu --squared-relu", ""),
        ("--seq-length 128 --swiglu --quick-geglu", ""),
        ("--seq-length 128 --num-experts 4 --moe-router-topk 1", "use --moe-router-pre-softmax when topk is 1"),
        ("--seq-length 128 --encoder-seq-length 128", ""),
        ("--seq-length 128 --position-embedding-type mrope", "--mrope-section should be set"),
        ("--seq-length 128 --mtp-num-layers 1", "not supported with learned_absolute position embedding"),
        ("--seq-length 128 --multi-latent-attention --group-query-attention", "mutually exclusive with multi latent"),
        ("--seq-length 128 --multi-latent-attention --rotary-interleaved", "rotary_interleaved does not work with"),
        ("--seq-length 128 --rope-type yarn", 'Common attention only support rope_type="rope"'),
        ("--seq-length 128 --moe-router-enable-expert-bias", "only supports 'sigmoid'"),
        ("--seq-length 128 --moe-router-group-topk 2", "moe_router_num_groups must be specified"),
        ("--seq-length 128 --moe-router-group-topk 2 --moe-router-num-groups 2", "unsupported operand"),
        ("--seq-length 128 --num-experts 4 --moe-router-group-topk 3 --moe-router-num-groups 2", "should be smaller"),
        ("--seq-length 128 --num-experts 4 --moe-router-group-topk 2 --moe-router-num-groups 3", "be divisible by"),
    ],
)
def test_model_flags_that_are_refused_are_refused_here_too(more: str, refused: str, validate: Validate):
    with pytest.raises(PlanError):
        read_model(Options.parse(f"{GIVEN} --vocab-size 1000 {more}".split()))
    with pytest.raises((AssertionError, TypeError, ValueError), match=refused):
        validate(dataclasses.replace(SMALL, given_flags=f"{GIVEN} {more}"), ALONE)


def test_no_flag_of_megatron_looks_misspelled(parser: argparse.ArgumentParser):
    ours = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --vocab-size 9 --micro-batch-size 1"
    for flag in (flag for action in parser._actions for flag in action.option_strings):
        with suppress(PlanError):  # Not everything is priced.
            notes = read(Options.parse([flag, "1", *ours.split()]), gpus=1).notes
            assert not any("did you mean" in note for note in notes), flag


ODD, UNTIED = dataclasses.replace(SMALL, num_layers=15), dataclasses.replace(SMALL, tied=False)
WRONG: dict[str, tuple[Model, dict[str, Any], str, str]] = {
    "layers that do not divide": (
        SMALL,
        {"pipeline": 3},
        "does not divide num_layers 16",
        "Number of layers should be divisible",
    ),
    "heads that do not divide": (
        SMALL,
        {"tensor": 16},
        "does not divide num_attention_heads 8",
        "must be a multiple of tensor_model_parallel_size",
    ),
    "no pipeline for gems": (
        SMALL,
        {"schedule": "gems", "pipeline": 1},
        "gems needs at least 2",
        "--pipeline-model-parallel-size of at least 2",
    ),
    "an odd depth for gems": (
        ODD,
        {"schedule": "gems", "pipeline": 3},
        "needs an even depth",
        "3 stages: use an even number",
    ),
    "tied embeddings for pipedream": (
        SMALL,
        {"schedule": "pipedream"},
        "cannot tie the embeddings",
        "--untie-embeddings-and-output-weights",
    ),
    "several microbatches for pipedream": (UNTIED, {"schedule": "pipedream"}, "microbatches 16", "have 1, not 16"),
    "k of gems": (
        SMALL,
        {"schedule": "gems", "mixpipe_k": 2},
        "mixpipe_k 2: gems has no such number",
        "--mixpipe-k / --mixpipe-gamma",
    ),
    "no pipeline for 2bw": (
        SMALL,
        {"schedule": "2bw", "pipeline": 1},
        "2bw needs at least 2",
        "--pipeline-model-parallel-size of at least 2",
    ),
    "too few microbatches": (
        SMALL,
        {"schedule": "2bw", "pipeline": 4, "global_batch": 2},
        "2bw needs at least 3",
        "2 microbatches per batch on --pipeline-model-parallel-size 4",
    ),
    "chunks of 2bw": (
        SMALL,
        {"schedule": "2bw", "chunks": 2},
        "2bw does not interleave",
        "--num-virtual-stages-per-pipeline-rank",
    ),
}
"""What is wrong, and what the rule and the refusal say."""


@pytest.mark.parametrize("case", WRONG)
def test_what_the_rules_refuse_is_refused_here_too(case: str, validate: Validate, capsys: pytest.CaptureFixture[str]):
    model, changes, rule, refused = WRONG[case]
    layout = Layout(**{"schedule": "megatron", "pipeline": 2, "data": 1, "global_batch": 16, **changes})
    assert rule in str(problem(model, layout))
    with pytest.raises((AssertionError, ValueError, SystemExit)) as refusal:
        validate(model, layout)
    assert refused in f"{refusal.value} {capsys.readouterr().err}"


@pytest.mark.parametrize(
    "more",
    [
        "",
        "--swiglu --untie-embeddings-and-output-weights --disable-bias-linear --position-embedding-type rope "
        "--normalization RMSNorm --use-distributed-optimizer --sequence-parallel --recompute-granularity full "
        "--recompute-method block --recompute-num-layers 2 --group-query-attention --num-query-groups 2",
        "--num-experts 4 --expert-model-parallel-size 2 --moe-ffn-hidden-size 256 --moe-layer-freq ([0]*1+[1]*7) "
        "--disable-bias-linear --sequence-parallel --attention-backend unfused",
        "--pipeline-schedule 2bw --pipeline-extra-in-flight 1 --pipeline-gradient-buffers 1 --transformer-impl local",
        "--num-layers-per-virtual-pipeline-stage 2 --no-bias-gelu-fusion --squared-relu",
        "--multi-latent-attention --kv-lora-rank 64 --position-embedding-type rope --mtp-num-layers 1",
        "--optimizer muon --use-distributed-optimizer --overlap-grad-reduce",
        "--optimizer lion --use-distributed-optimizer --pipeline-schedule 1f1b-flush",
    ],
)
def test_a_row_of_megatrons_arguments_is_priced_as_its_flags(more: str, accept: Accept) -> None:
    """Of all of them, as ``vars(args)`` has them in a training script."""
    words = [*model_flags(dataclasses.replace(SMALL, num_layers=8)), *more.split()]
    words += "--micro-batch-size 1 --global-batch-size 32 --bf16 --no-rope-fusion".split()
    words += "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2".split()
    cluster = CLUSTERS["dgx-h100"]
    run = read(Options.parse([*words, *TRAINING]), gpus=16, gpu=cluster.gpu)
    expected = prediction_json(run.model, price(run.model, run.layout, sized(cluster, gpus=16)))
    row = json.loads(json.dumps({**vars(accept(words, 16)), "cluster": "dgx-h100"}, default=str))
    assert predicted(row) == {**expected, "notes": list(run.notes)}


def test_the_names_of_megatrons_flags_are_known(parser: argparse.ArgumentParser) -> None:
    """All that a supported version has, and no others."""
    named = {option for action in parser._actions for option in action.option_strings if option.startswith("--")}
    assert named - {"--help"} - MEGATRONS == OURS
    assert len(MEGATRONS - named) in (64, 4), "0.18.2 has four flags that 0.19.2 has not, and lacks 64"


def test_arguments_that_are_looked_at_name_their_flags(parser: argparse.ArgumentParser) -> None:
    """Or a row of ``vars(args)`` would be read without them, or with the opposite of what they say."""
    actions = {option: action for action in parser._actions for option in action.option_strings if option in CHECKED}
    named = {flag: flag_of(action.dest) for flag, action in actions.items()}
    assert {flag: other for flag, other in named.items() if other not in actions[flag].option_strings} == {}
    negative = {action.dest for action in actions.values() if isinstance(action, argparse._StoreFalseAction)}
    assert negative == {action.dest for action in actions.values()} & set(NEGATED)


def test_megatrons_optimizers_are_known(parser: argparse.ArgumentParser) -> None:
    (action,) = (action for action in parser._actions if action.dest == "optimizer")
    assert set(OPTIMIZERS) == set(action.choices)
