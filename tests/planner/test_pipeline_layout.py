"""``--pipeline-model-parallel-layout``: read and refused as by Megatron, and priced by what stages then hold."""

from __future__ import annotations

import itertools
import json
import random
from dataclasses import replace
from typing import Any

import pytest

from megatron_2bw.cli import main
from megatron_2bw.planner.cost import costs
from megatron_2bw.planner.errors import PlanError
from megatron_2bw.planner.flags.flags import layout_flags, read
from megatron_2bw.planner.flags.options import Options
from megatron_2bw.planner.memory import activations, memory
from megatron_2bw.planner.naming import name
from megatron_2bw.planner.pipeline import batch
from megatron_2bw.planner.pipeline.stages import contents_of, free_stages
from megatron_2bw.planner.pipeline.weights import weights_of
from megatron_2bw.planner.rows.rows import predicted
from megatron_2bw.planner.rules import problem
from megatron_2bw.planner.specs.cluster import CLUSTERS
from megatron_2bw.planner.specs.layout import Layout, Optimizer, Recompute, RecomputeMethod
from megatron_2bw.planner.specs.model import Model
from megatron_2bw.planner.specs.models import MODELS
from megatron_2bw.planner.specs.pipeline_layout import chunks_of, layout_problem, stages_of

DGX = CLUSTERS["dgx-h100"]
GPT = Model(num_layers=16, hidden_size=2048, num_attention_heads=16, seq_length=1024, vocab_size=50257)
TOKENS = replace(GPT, mtp_num_layers=1, learned_positions=False)
MIXED = replace(
    TOKENS, num_experts=8, bias=False, swiglu=True, tied=False, dense_layers=3, ffn_hidden_size=1024, vocab_size=32000
)
"""With layers of every kind."""
DEEPSEEK = "Et*3|(tt|)*29,m|L"
"""Of DeepSeek-V3 on 16 ranks, as Megatron's documentation has it."""


def layout(**changes: Any) -> Layout:
    """Four stages and 16 microbatches."""
    return Layout(**({"schedule": "1f1b-flush", "pipeline": 4, "data": 2, "global_batch": 32} | changes))


READ = [
    ("Et*2|(tt|)*5t|tmL", 4, 14, 1),
    ("Et*2|(tt|)*5t|tmL", 8, 14, 1),
    (DEEPSEEK, 16, 61, 1),
    ("Et|(tt|)*30mL", 8, 61, 1),
    ("E|(t|)*126L", 16, 126, 0),
    ("Et*2|(t*2|)*34,t*3|(t*2|)*3,tL", 8, 80, 0),
    ("E||t|L", 2, 1, 0),
    ("|Et|t|L|", 5, 2, 0),
    ("E,t,,t|t,L", 2, 3, 0),
    ("E(t|)*3tL", 2, 4, 0),
    ("E(t*2|)*2tL", 3, 5, 0),
    ("Et|*3tL", 4, 2, 0),
    ("Et*0t|tL", 2, 2, 0),
    ("EtL", 1, 1, 0),
    ("EL", 1, 0, 0),
    ("E*1t*03|(tL)*1", 2, 4, 0),
    ("Ett|tm*2|L", 3, 3, 2),
    ("Ettm|L", 2, 2, 1),
    ("E|ttt|m|L", 2, 3, 1),
]
REFUSED = [
    ("", 1, 0, 0, "does not begin with E"),
    ("tE|L", 2, 1, 0, "does not begin with E"),
    ("Et|t", 2, 2, 0, "does not end with L"),
    ("Et|EtL", 2, 2, 0, "has 2 E"),
    ("EtL|tL", 2, 2, 0, "has 2 L"),
    ("Et|tL", 2, 3, 0, "has 2 layers (t), not num_layers 3; use 3"),
    ("Et|tmL", 2, 2, 0, "has 1 layers (m), not mtp_num_layers 0; use 0"),
    ("Et|tL", 2, 2, 1, "has 0 layers (m), not mtp_num_layers 1; use 1"),
    ("Et|mt|L", 3, 2, 1, "has a layer (t) behind m"),
    ("Et|tm|||L", 5, 3, 1, "has 2 layers (t)"),
    ("Et|tm|L|", 2, 2, 1, "has m on stage 1, which is not the last one of its rank; put m on one of the stages 2 to 3"),
    ("Et|m|m|L", 4, 1, 2, "has m on 2 stages; put all of them on one"),
    ("E|(t|)*3,m|m||L", 8, 3, 2, "has m on 2 stages"),  # The example of --help.
    ("Et|t|tL", 2, 3, 0, "has 3 stages, no multiple of pipeline 2; use pipeline 1"),
    ("Et|xL", 2, 1, 0, "'x' is no layer"),
    ("Et |tL", 2, 2, 0, "' ' is no layer"),
    ("e|tL", 2, 1, 0, "'e' is no layer"),
    ("E((t|)*2)*2L", 4, 4, 0, "is no layer"),
    ("E()*2|tL", 2, 1, 0, "is no layer"),
    ("Et*|tL", 2, 2, 0, "'*' is no layer"),
    ("Et**2L", 1, 2, 0, "'*' is no layer"),
    ("Et-1|L", 2, 1, 0, "'-' is no layer"),
    ("E(t|t)2|L", 2, 2, 0, "is no layer"),
]


def refused(text: str, pipeline: int, layers: int, tokens: int) -> str:
    """Why Megatron's reader and ours say no; empty if ours does not."""
    try:
        found = layout_problem(text, pipeline=pipeline, num_layers=layers, mtp_num_layers=tokens)
    except PlanError as error:
        return str(error)
    return str(found or "")


def megatrons(text: str, pipeline: int, layers: int, tokens: int) -> Any:
    """Megatron's own reading.

    Raises:
        AssertionError: it does not take it; IndexError of nothing at all.
    """
    reader = pytest.importorskip("megatron.core.transformer.pipeline_parallel_layer_layout")
    found = reader.PipelineParallelLayerLayout(text, pipeline)
    found.validate_layer_layout(layers, tokens)
    return found


@pytest.mark.parametrize(("text", "pipeline", "layers", "tokens"), READ)
def test_reads_what_megatron_reads(text: str, pipeline: int, layers: int, tokens: int):
    assert refused(text, pipeline, layers, tokens) == ""
    theirs = megatrons(text, pipeline, layers, tokens)
    assert chunks_of(text, pipeline) == theirs.virtual_pipeline_model_parallel_size
    letters = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}
    of_ranks = [["".join(letters[layer.name] for layer in chunk) for chunk in rank] for rank in theirs.layout]
    assert [list(stages_of(text)[rank::pipeline]) for rank in range(pipeline)] == of_ranks


@pytest.mark.parametrize(("text", "pipeline", "layers", "tokens", "why"), REFUSED)
def test_refuses_what_megatron_refuses(text: str, pipeline: int, layers: int, tokens: int, why: str):
    assert why in refused(text, pipeline, layers, tokens)
    assert refused(text, pipeline, layers, tokens).startswith(f"pipeline_layout {text!r}")
    with pytest.raises((AssertionError, IndexError)):
        megatrons(text, pipeline, layers, tokens)


def test_takes_and_refuses_random_texts_as_megatron_does():
    """Half of them any symbols, the others stages in which one thing may be wrong."""
    rng, taken = random.Random(7), 0
    for trial in range(4000):
        if trial % 2:
            text = "".join(rng.choice("EttmL||(),*23") for _ in range(rng.randint(1, 9)))
        else:
            text = "E" + "".join(rng.choice(["t", "t", "|", "tt|", "(t|)*2", "t*2", "|m", ","]) for _ in range(5)) + "L"
        order = "".join(stages_of(text)) if refused(text, 1, 0, 0).find("is no layer") < 0 else text
        counts = order.count("t") + (rng.random() < 0.1), order.count("m")
        pipeline = rng.randint(1, 4)
        try:
            megatrons(text, pipeline, *counts)
        except (AssertionError, IndexError):
            assert refused(text, pipeline, *counts), (text, pipeline, counts)
        else:
            assert not refused(text, pipeline, *counts), (text, pipeline, counts)
            taken += 1
    assert taken > 500


def test_too_many_layers_are_not_written_out():
    for text in ("Et*99999999999|L", "E(tttttttttt|)*9999L"):
        assert "gives too many layers" in refused(text, 2, 4, 0)


USUAL = {
    "as many layers each": ("Et*4|(t*4|)*2t*4L", {}),
    "fewer on the ends": ("E,ttt|t*5|(t*5|)*1tttL", {"first_stage_layers": 3, "last_stage_layers": 3}),
    "more on the first": ("Et*7|ttt|ttt|tttL", {"first_stage_layers": 7}),
    "fewer on the last": ("Et*5|t*5|t*5|tL", {"last_stage_layers": 1}),
    "two stages": ("Et*9|t*7L", {"pipeline": 2, "first_stage_layers": 9, "last_stage_layers": 7}),
    "two stages, one of them given": ("Et*9|t*7L", {"pipeline": 2, "last_stage_layers": 7}),
    "one stage": ("Et*16L", {"pipeline": 1, "schedule": "megatron"}),
    "two chunks": ("E(tt|)*7ttL", {"schedule": "megatron", "chunks": 2}),
    "two chunks, fewer on the ends": (
        "Et|(t*3|)*2t|t|(ttt|)*2tL",
        {"schedule": "megatron", "chunks": 2, "first_stage_layers": 2, "last_stage_layers": 2},
    ),
}
ONE_DENSE = replace(MIXED, dense_layers=1)
SCHEDULES = ("2bw", "1f1b-flush", "gpipe", "megatron", "inter-layer", "pipedream", "gems", "chimera", "mixpipe")


@pytest.mark.parametrize("how", USUAL)
@pytest.mark.parametrize("model", [GPT, MIXED, ONE_DENSE], ids=["gpt", "mixed", "one dense layer"])
def test_what_other_flags_say_costs_the_same(model: Model, how: str):
    """To the last bit."""
    text, fields = USUAL[how]
    schedules, compared = (fields["schedule"],) if "schedule" in fields else SCHEDULES, 0
    for schedule, recompute in itertools.product(schedules, (Recompute.NONE, Recompute.FULL)):
        more = {"schedule": schedule, "recompute": recompute, "optimizer": Optimizer.MUON} | fields
        said = layout(**more)
        given = layout(
            **{key: value for key, value in more.items() if key not in ("chunks", "first_stage_layers")}
            | {"last_stage_layers": 0, "pipeline_layout": text.replace("L", "mL" if model.mtp_num_layers else "L")}
        )
        if why := problem(model, said):  # A layout may have layers without experts on several stages.
            assert problem(model, given) or "or a pipeline_layout" in why.remedy
            continue
        assert problem(model, given) is None
        assert given.chunks == said.chunks
        assert costs.iteration(model, given, DGX) == costs.iteration(model, said, DGX)
        assert memory.stages(model, given) == memory.stages(model, said)
        assert memory.largest(model, given) == memory.largest(model, said)
        compared += 1
    assert compared or (model is MIXED and "chunks" in fields), "whose chunks have fewer layers than three"


@pytest.mark.parametrize("schedule", ["2bw", "1f1b-flush", "gpipe", "megatron"])
def test_a_layer_less_on_the_slowest_stage(schedule: str):
    """Shortens the batch; its memory goes along."""
    slow, better = (
        layout(schedule=schedule, pipeline_layout=text) for text in ("Ettt|t*7|t*4|ttL", "Ettt|t*6|t*5|ttL")
    )
    slow_s, better_s = (costs.iteration(GPT, one, DGX).time_s for one in (slow, better))
    layer_s = costs.times_of(GPT, slow, DGX).works.layer
    assert slow_s - better_s >= 0.85 * 16 * (layer_s.forward_s + layer_s.backward_s)
    of_layer = 2 * weights_of(GPT, 1).layer
    before, after = (memory.stages(GPT, one) for one in (slow, better))
    moved = [now.weights_bytes - then.weights_bytes for then, now in zip(before, after, strict=True)]
    assert moved == [0, -of_layer, of_layer, 0]
    kept = [now.activations_bytes - then.activations_bytes for then, now in zip(before, after, strict=True)]
    forwards = {"2bw": (3, 2), "gpipe": (16, 16)}.get(schedule, (3, 2))
    layer = activations.of_layer(GPT, slow).kept
    assert kept == [0, pytest.approx(-forwards[0] * layer), pytest.approx(forwards[1] * layer), 0]
    fullest = layout(schedule=schedule, pipeline_layout="Et|t|t*13|tL")
    assert memory.largest(GPT, fullest) == memory.stages(GPT, fullest)[2]


@pytest.mark.parametrize("schedule", ["2bw", "1f1b-flush"])
def test_embedding_and_loss_alone(schedule: str):
    one = layout(schedule=schedule, pipeline_layout="E|t*8|t*8|L")
    assert problem(GPT, one) is None
    times = costs.times_of(GPT, one, DGX)
    embedding, loss = times.works.embedding, times.works.loss
    assert times.pipeline.each[0] == (embedding.forward_s, embedding.backward_s)
    assert times.pipeline.each[-1] == (loss.forward_s, loss.backward_s)
    assert times.pipeline.each[1].forward_s == pytest.approx(8 * times.works.layer.forward_s)
    first, *_, last = memory.stages(GPT, one)
    words, vector = 2048 * GPT.padded_vocab_size(), 2 * 2048
    assert (first.weights_bytes, last.weights_bytes) == (2 * (words + 1024 * 2048), 2 * (words + vector))
    in_flight = 4
    assert first.activations_bytes == in_flight * 1024 * 2048  # Dropout's mask.
    assert first.working_bytes == 2 * words - 1024 * 2048  # The gradient of all words, after one mask is given back.
    assert last.activations_bytes == 0
    assert last.logits_bytes == memory.stages(GPT, layout(schedule=schedule))[-1].logits_bytes


def test_empty_stages_pass_on():
    """They take no time and no memory; only Megatron runs them."""
    empty, full = (layout(schedule="megatron", pipeline_layout=text) for text in ("Et*8||t*7|tL", "Et*8|t|t*6|tL"))
    pipeline = costs.times_of(GPT, empty, DGX).pipeline
    assert pipeline.each[1] == (0, 0)
    assert memory.stages(GPT, empty)[1].total_bytes == memory.CONTEXT_BYTES
    assert problem(GPT, empty) is None
    for schedule in ("2bw", "1f1b-flush", "gems"):
        assert "has an empty stage" in str(problem(GPT, replace(empty, schedule=schedule)))
        assert problem(GPT, replace(full, schedule=schedule)) is None


def test_embedding_and_loss_are_on_the_ends_wherever_the_letters_are():
    """Megatron looks at ranks alone for them."""
    first, *_, last = (
        contents_of(GPT, layout(schedule="megatron", pipeline_layout="|Et*8|t*8L|"), i) for i in range(4)
    )
    assert first[0].embedding
    assert last[0].loss
    assert first[0].layers == last[0].layers == 0


@pytest.mark.parametrize("send_gb_s", [900, 1])
@pytest.mark.parametrize(
    "text", ["Ettt|t*6|t*3|t*4L", "E|t*8|t*8|L", "Et*9|t|t*2|t*4L", "Et|tt|t|t*12L", "Et*8||t*7|tL"]
)
def test_times_of_free_stages_are_the_simulators(text: str, send_gb_s: float):
    cluster = replace(DGX, intra_node_gb_s=send_gb_s)
    for schedule, m in itertools.product(("1f1b-flush", "gpipe", "inter-layer", "2bw"), (4, 9, 40)):
        one = layout(schedule=schedule, global_batch=2 * m, pipeline_layout=text)
        pipeline = costs.times_of(GPT, one, cluster).pipeline
        simulated_s = batch.simulated_s(one, pipeline)
        assert batch.batch_s(one, pipeline) == pytest.approx(simulated_s, rel=1e-9)
        slowest = max(stage.pair_s for stage in pipeline.each)
        assert simulated_s >= m * slowest
        parts = costs.iteration(GPT, one, cluster)
        assert sum(parts.parts.values()) == pytest.approx(parts.time_s)
        assert min(parts.parts.values()) >= -1e-12 * parts.time_s


def test_layers_without_experts_wherever_they_are():
    """Three of them: two on the first stage, one on the second."""
    one = layout(schedule="megatron", pipeline_layout="Ett|t*5|t*5|t*4mL")
    assert [held.dense for stage in range(4) for held in contents_of(MIXED, one, stage)] == [2, 1, 0, 0]
    times = costs.times_of(MIXED, one, DGX)
    of = times.works
    forward_s = of.dense.forward_s + 4 * of.layer.forward_s
    assert times.pipeline.each[1].forward_s == pytest.approx(forward_s)
    assert times.pipeline.each[3].forward_s == pytest.approx(
        4 * of.layer.forward_s + of.mtp.forward_s + 2 * of.loss.forward_s
    )
    held = weights_of(MIXED, 1)
    second = memory.stages(MIXED, one)[1]
    assert second.weights_bytes == 2 * (held.dense_layer + 4 * (held.layer + held.experts))
    kept = activations.of_layer(MIXED.dense, one).kept + 4 * activations.of_layer(MIXED, one).kept
    assert second.activations_bytes == pytest.approx(3 * kept)
    block = replace(one, recompute=Recompute.FULL, recompute_method=RecomputeMethod.BLOCK, recompute_layers=1)
    again = costs.times_of(MIXED, block, DGX)
    backward_s = again.works.dense.backward_s + 4 * again.works.layer.backward_s + again.works.dense.again_s
    assert again.pipeline.each[1].backward_s == pytest.approx(backward_s)


def test_further_tokens_before_the_last_stage():
    """Their layer goes, their loss stays, a third stage has the embedding, transfers from there are twice as long."""
    beside, apart = (
        layout(schedule="megatron", pipeline_layout=text) for text in ("Et*6|t*6|t*2|t*2mL", "Et*6|t*6|t*4m|L")
    )
    times = [costs.times_of(TOKENS, one, DGX) for one in (beside, apart)]
    of = times[1].works
    assert times[1].pipeline.each[2].forward_s == pytest.approx(4 * of.layer.forward_s + of.mtp.forward_s)
    assert times[1].pipeline.each[3].forward_s == pytest.approx(2 * of.loss.forward_s)
    send_s = times[1].pipeline.send_s
    assert times[1].pipeline.links_s == (send_s, send_s, 2 * send_s)
    assert set(times[0].pipeline.links_s) == {send_s}
    assert times[1].pipeline.norm_s > times[0].pipeline.norm_s
    of_stages = [memory.stages(TOKENS, one) for one in (beside, apart)]
    held = weights_of(TOKENS, 1)
    assert of_stages[1][2].weights_bytes == 2 * (5 * held.layer + held.mtp + held.word_embedding + held.final_norm)
    kept = activations.of_mtp(TOKENS, apart) + 4 * activations.of_layer(TOKENS, apart).kept
    assert of_stages[1][2].activations_bytes == pytest.approx(2 * kept)  # Of two forwards.
    assert of_stages[1][3].logits_bytes == of_stages[0][3].logits_bytes
    assert of_stages[1][3].activations_bytes == 0
    for schedule in ("2bw", "1f1b-flush", "gpipe"):
        assert "has m before the last stage" in str(problem(TOKENS, replace(apart, schedule=schedule)))
        assert problem(TOKENS, replace(beside, schedule=schedule)) is None


def test_deepseek_v3_as_megatron_documents_it():
    model = MODELS["deepseek-v3"]
    one = Layout(
        schedule="megatron",
        pipeline=16,
        data=32,
        tensor=2,
        expert=64,
        expert_tensor=1,
        global_batch=8192,
        sequence_parallel=True,
        distributed_optimizer=True,
        pipeline_layout=DEEPSEEK,
    )
    assert problem(model, one) is None
    assert one.chunks == 2
    held = [contents_of(model, one, stage) for stage in range(16)]
    assert [chunk.layers for chunk in held[0]] == [3, 2]
    assert [chunk.layers for chunk in held[14]] == [2, 0]
    assert held[0][0].dense == 3
    assert held[14][1].mtp == 1
    assert held[15][1].loss
    weights = weights_of(model, 2, expert=64, expert_tensor=1)
    needed = memory.stages(model, one)
    assert needed[5].weights_bytes == 2 * 4 * (weights.layer + weights.experts)
    assert needed[14].weights_bytes - needed[5].weights_bytes == 2 * (
        weights.mtp + weights.word_embedding - weights.layer - weights.experts
    )
    together = replace(one, pipeline_layout="Et*3|(tt|)*29|mL")
    batch_s = [costs.iteration(model, each, replace(DGX, nodes=128)).time_s for each in (one, together)]
    assert batch_s[0] < batch_s[1]  # The last rank had the layer and both losses.
    with pytest.raises(PlanError, match="not mtp_num_layers 0"):
        costs.iteration(replace(model, mtp_num_layers=0), one, DGX)


WORDS = (
    "--num-layers 16 --hidden-size 2048 --num-attention-heads 16 --seq-length 1024 --max-position-embeddings 1024 "
    "--vocab-size 50257 --micro-batch-size 1 --global-batch-size 32 --bf16 --pipeline-model-parallel-size 4"
).split()
FLAG = "--pipeline-model-parallel-layout"


def read_layout(*words: str) -> Layout:
    return read(Options.parse([*WORDS, *words]), gpus=8).layout


@pytest.mark.parametrize("text", ["E|t*8|t*8|L", "Et*2|(t*2|)*6t*2L", "Ettt|t*5,|t*4|t*4L"])
def test_the_flag_is_read_and_printed(text: str):
    found = read_layout(FLAG, text)
    assert found.pipeline_layout == text
    assert found.chunks == (2 if ")" in text else 1)
    flags = layout_flags(GPT, found)
    assert flags[flags.index(FLAG) + 1] == text
    assert not {"--num-layers-per-virtual-pipeline-stage", "--num-virtual-stages-per-pipeline-rank"}.intersection(flags)
    assert read_layout(*flags) == found
    assert f",{text.replace(',', '')}" in name(found)
    row = {"cluster": "dgx-h100", "gpus": 8, "pp": 4, "mbs": 1, "gbs": 32, "bf16": True, "num_layers": 16}
    sizes = {"hidden_size": 2048, "num_attention_heads": 16, "seq_length": 1024, "vocab_size": 50257}
    found_s = predicted({**row, **sizes, "pipeline_model_parallel_layout": text})["time_s"]
    assert found_s == costs.iteration(GPT, found, replace(DGX, gpus_per_node=8)).time_s


@pytest.mark.parametrize(
    "others",
    [
        "--num-layers-per-virtual-pipeline-stage 2",
        "--num-virtual-stages-per-pipeline-rank 2",
        "--decoder-first-pipeline-num-layers 4",
        "--decoder-last-pipeline-num-layers 4",
        "--account-for-embedding-in-pipeline-split",
        "--account-for-loss-in-pipeline-split",
    ],
)
def test_flags_that_say_the_same_exclude_it(others: str, capsys: pytest.CaptureFixture[str]):
    words = [*WORDS, FLAG, "E(tt|)*7ttL", *others.split()]
    assert main(["estimate", "--cluster", "dgx-h100", "--gpus", "8", *words]) == 2
    said = capsys.readouterr().err
    assert FLAG in said
    assert f"{others.split()[0]} exclude each other" in said


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ([FLAG], "has no value"),
        ([FLAG, ""], "has no embedding"),
        ([FLAG, "Et*8|t*8L"], "has 2 stages, no multiple of --pipeline-model-parallel-size 4"),
        ([FLAG, "Et*8|t|t|t*8L"], "has 18 layers (t), not --num-layers 16; use 16"),
        ([FLAG, "E|t*8|t*8|K"], "'K' is no layer"),
        ([FLAG, "E|t*8||t*8L", "--pipeline-schedule", "2bw"], "with an empty stage"),
        (
            [FLAG, "E(tt|)*7ttL", "--pipeline-schedule", "2bw"],
            "--num-virtual-stages-per-pipeline-rank does not work with --pipeline-schedule 2bw",
        ),
        (
            [FLAG, "E(tt|)*7ttL", "--global-batch-size", "36"],
            "interleaving needs a multiple of --pipeline-model-parallel-size 4",
        ),
        (
            [FLAG, "E(tt|)*7ttL", "--microbatch-group-size-per-virtual-pipeline-stage", "8"],
            "groups of more microbatches than there are stages",
        ),
    ],
)
def test_refused_flags(words: list[str], why: str, capsys: pytest.CaptureFixture[str]):
    assert main(["estimate", "--cluster", "dgx-h100", "--gpus", "8", *WORDS, *words]) == 2
    assert why in capsys.readouterr().err


def test_fields_that_say_the_same_exclude_it():
    for fields, why in (
        ({"first_stage_layers": 4}, "first_stage_layers 4: pipeline_layout has all layers"),
        ({"last_stage_layers": 4}, "last_stage_layers 4: pipeline_layout has all layers"),
        ({"chunks": 4}, "chunks 4: pipeline_layout has 2 per rank"),
    ):
        with pytest.raises(PlanError, match=why):
            layout(schedule="megatron", pipeline_layout="E(tt|)*7ttL", **fields)


def test_an_estimate_of_a_script(tmp_path, capsys: pytest.CaptureFixture[str]):
    script = tmp_path / "train.sh"
    script.write_text(
        f"LAYOUT='E|t*8|t*8|L'\ntorchrun --nproc-per-node 8 pretrain_gpt.py {' '.join(WORDS)} {FLAG} $LAYOUT\n"
    )
    assert main(["estimate", "--cluster", "dgx-h100", "--from-script", str(script), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["layout"]["pipeline_layout"] == "E|t*8|t*8|L"
    assert f"{FLAG} 'E|t*8|t*8|L'" in found["flags"]
    assert free_stages(GPT, layout(**found["layout"]))


@pytest.mark.parametrize(
    ("layers", "more", "text"),
    [
        (14, "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split", "Ettt|(tttt|)*2tttL"),
        (15, "--account-for-loss-in-pipeline-split", "Etttt|(tttt|)*2tttL"),
        (
            14,
            "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split "
            "--num-layers-per-virtual-pipeline-stage 2",
            "Et|(tt|)*6tL",
        ),
        (
            15,
            "--account-for-embedding-in-pipeline-split --num-virtual-stages-per-pipeline-rank 4",
            "E|(t|)*14tL",
        ),
    ],
)
def test_embedding_and_loss_may_count_as_layers(layers: int, more: str, text: str):
    words = [*WORDS[2:], "--num-layers", str(layers), *more.split()]
    assert read(Options.parse(words), gpus=4).layout.pipeline_layout == text


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("--account-for-loss-in-pipeline-split", "4 stages do not divide 15 layers, as they are then counted; use 3"),
        (
            "--account-for-loss-in-pipeline-split --decoder-first-pipeline-num-layers 2",
            "--account-for-loss-in-pipeline-split and --decoder-first-pipeline-num-layers exclude each other",
        ),
    ],
)
def test_what_is_counted_must_split(more: str, message: str):
    with pytest.raises(PlanError, match=message):
        read(Options.parse([*WORDS[2:], "--num-layers", "14", *more.split()]), gpus=4)
