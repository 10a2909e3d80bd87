"""How far the planner's predictions are from what others measured.

    python scripts/bench/planner_accuracy.py [--data FOLDER] [--output scripts/bench/results/planner_accuracy.txt]

The constants of the cost model were fitted by ``planner_fit.py`` on the rows that are called fitted here; no other row
was used. Beside it, on the same rows: ``FLOPs/(n*X) * (1 + (d-1)/m)`` with one constant, and a linear model with seven,
both fitted on the same rows as well.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from accuracy import HEADING, Accuracy, Predict, by_group, linear, naive

from megatron_2bw.planner.cost import costs
from megatron_2bw.planner.cost.layer import works_of
from megatron_2bw.planner.cost.speeds import machine_of, speed_of
from megatron_2bw.planner.errors import PlanError
from megatron_2bw.planner.memory import memory
from megatron_2bw.planner.specs.model import Kind
from tests.planner import (
    measured,
    measured_deepseek,
    measured_dgxc,
    measured_experts,
    measured_fp8,
    measured_libai,
    measured_tables,
    measured_vocabularies,
)
from tests.planner.measured import Row

PUBLISHED = (
    "Published, on all of vTrain's rows: Calculon MAPE 15.3% (median 9.7%, most 70%) multi-node, 38.9% single-node;",
    "vTrain itself, which profiles, 14.73% and 8.37% (its own claim).",
)

UNPRICED = (
    "NeMo 24.07: fine-tuning. Megatron-Bridge: products in 4 bits, sharded parameters, layers of several kinds",
    "(gpt-oss, Nemotron 3). ZeRO-3 (Narayanan et al., 2021, Table 2).",
    "Megatron's other test cases: a hidden size up to 1024, images, reinforcement learning, or no vocabulary.",
    "Times of Mixtral's test cases called A100: 297 and 364 TFLOP/s per GPU are none of an A100's, with a peak of 312.",
)
BIGSCIENCE = (
    "Megatron-DeepSpeed, 384 A100s (BigScience, before BLOOM; not fitted). Single iterations; some, if not all, with",
    "CUDA_LAUNCH_BLOCKING=1, which the authors used against hangs: the host waits for every kernel, small ones cost",
    "more.",
)
OLD_ATTENTION = 0.35
"""Of the peak of an H100, by FlashAttention-2: Shah et al., "FlashAttention-3" (arXiv 2407.08608), abstract."""
SCRATCH_NOTE = (
    f"{measured.SCRATCH} begins with random weights, the other two do not:",
    "its router does not yet keep the experts nearly equally busy, which predictions assume.",
)


def predicted_s(row: Row) -> float:
    """By the cost model."""
    return costs.iteration(row.model, row.layout, row.cluster).time_s


def fitted_rows(which: str) -> list[Row]:
    """Rows of vTrain's on which the constants were fitted: its 18.4B model, and one model on 8 GPUs."""
    rows = measured.vtrain(which)
    if which == "multi_node":
        return [row for row in rows if row.group.startswith("18.4")]
    return [row for row in rows if row.layout.gpus == 8]


def vtrain(which: str, title: str, folder: Path) -> Iterator[str]:
    """One table: every predictor on fitted rows, on others, and on all."""
    fitted = fitted_rows(which)
    rows, refused = _priced(measured.vtrain(which, folder))
    parts = {
        "fitted rows": [row for row in rows if row in fitted],
        "other rows": [row for row in rows if row not in fitted],
        "all rows": rows,
    }
    predictors: dict[str, Predict] = {
        "cost model": predicted_s,
        "linear, 7 constants": linear(fitted),
        "naive, 1 constant": naive(fitted),
    }
    yield from ("", title, HEADING)
    for part, chosen in parts.items():
        if len(chosen) > 1:
            yield from (Accuracy.of(predict, chosen).line(f"{part}: {name}") for name, predict in predictors.items())
    yield _as_stated(rows)
    yield from refused


def scatter(folder: Path) -> Iterator[str]:
    """The group with the largest regret of the multi-node rows, and how far its measurements follow any rule.

    With one stage a larger microbatch only means fewer and larger kernels, so a row that is slower than the one with
    half its microbatch shows what measuring adds.
    """
    groups = by_group(_priced(measured.vtrain("multi_node", folder))[0])
    group = max(groups, key=lambda name: Accuracy.of(predicted_s, groups[name]).regret)
    rows = sorted(groups[group], key=lambda row: row.measured)
    chosen = min(rows, key=predicted_s)
    yield from ("", f"vTrain, multi-node, where the regret is largest: {group}, its fastest rows")
    for row in rows[:8]:
        yield _line(row) + ("  <- predicted to be the fastest" if row is chosen else "")
    close = sum(row.measured <= 1.03 * rows[0].measured for row in rows)
    yield f"Measured within 3% of the fastest: {close} of {len(rows)}, the fastest among them"
    yield "Twice the microbatch, half as many: more time, measured and predicted"
    for row in rows:
        twice = replace(row.layout, microbatch=2 * row.layout.microbatch)
        for other in (other for other in rows if other.layout == twice):
            real, predicted = other.measured / row.measured, predicted_s(other) / predicted_s(row)
            yield f"{row.name} -> {other.layout.microbatch:<30} {real - 1:>+8.1%} {predicted - 1:>+8.1%}"


def _priced(rows: Iterable[Row]) -> tuple[list[Row], list[str]]:
    """Rows that have a price, and why others have none."""
    priced, refused = [], []
    for row in rows:
        try:
            predicted_s(row)
        except PlanError as error:
            refused.append(f"not priced: {row.group}, {row.name}: {error}")
        else:
            priced.append(row)
    return priced, refused


def layer_times(folder: Path) -> Iterator[str]:
    yield from ("", "One layer of 22B on 8 A100s, forward and backward (Korthikanti et al., Table 4; fitted)")
    machine = machine_of(measured.a100s(8, measured.SELENE_GBIT_S))
    for name, split, forward_s, backward_s in measured.layer_times(folder):
        layer = works_of(measured.LAYER_22B, split, machine).layer
        pairs = (layer.forward_s, forward_s), (layer.backward_s + layer.again_s, backward_s)
        yield f"{name:<44} " + "  ".join(
            f"{1e3 * predicted:>5.1f} ms, measured {1e3 * true:>5.1f} ({predicted / true - 1:+.1%})"
            for predicted, true in pairs
        )


def single(title: str, rows: Iterable[Row]) -> Iterator[str]:
    """One line per row."""
    yield from ("", title)
    yield from map(_line, rows)


def long_sequences(folder: Path) -> Iterator[str]:
    """With today's attention, and with that of their day."""
    title = "H100, sequences shared by up to 32 ranks, products in 8 bits (Llama 2 7B, NeMo 24.07; not fitted)"
    yield from (
        "",
        title,
        f"Last: with attention at {OLD_ATTENTION:.0%} of the peak, as FlashAttention-2 has (arXiv 2407.08608)",
    )
    for row in measured_fp8.long_sequences(folder):
        old = replace(speed_of(row.cluster.gpu), attention_efficiency=OLD_ATTENTION)
        before_s = costs.iteration(row.model, row.layout, row.cluster, old).time_s
        yield f"{_line(row)}  {before_s / row.measured - 1:+.1%}"


def is_as_stated(row: Row) -> bool:
    """Whether it took what is predicted, but for the error that is stated."""
    batch = costs.iteration(row.model, row.layout, row.cluster)
    return abs(row.measured / batch.time_s - 1) <= batch.relative_error


def _as_stated(rows: list[Row]) -> str:
    return f"within the stated error bar: {statistics.mean(map(is_as_stated, rows)):.0%} of {len(rows)} rows"


def ranges(title: str, rows: Iterable[Row]) -> Iterator[str]:
    """One line per group: how far off its rows are."""
    yield from ("", title)
    rows = list(rows)
    errors: dict[str, list[float]] = {}
    for row in rows:
        errors.setdefault(row.group, []).append(predicted_s(row) / row.measured - 1)
    for group, off in errors.items():
        span = f"{min(off):+.1%} to {max(off):+.1%}" if len(off) > 1 else f"{off[0]:+.1%}"
        yield f"{group:<44} {len(off):>3} row{'s' * (len(off) > 1)}, {span}"
    yield _as_stated(rows)


def _line(row: Row) -> str:
    time_s = predicted_s(row)
    return f"{row.name:<44} {time_s:>8.2f} s, measured {row.measured:>8.2f} s ({time_s / row.measured - 1:+.1%})"


def bigscience(folder: Path) -> Iterator[str]:
    """By group: the machine got faster between them."""
    yield from ("", *BIGSCIENCE, HEADING)
    rows = measured.bigscience(folder)
    for name, group in {**by_group(rows), "all rows": rows}.items():
        yield Accuracy.of(predicted_s, group).line(name)
    yield from map(_line, rows)


def parted(title: str, rows: Sequence[Row], parts: dict[str, Callable[[Row], bool]]) -> Iterator[str]:
    """In all, by part, and one line per row."""
    yield from ("", title, HEADING, Accuracy.of(predicted_s, rows).line("all rows"))
    for name, is_of in parts.items():
        yield Accuracy.of(predicted_s, [row for row in rows if is_of(row)]).line(name)
    yield from map(_line, rows)
    yield from (_as_stated(rows), _not_to_fit(rows))


def v100s(folder: Path) -> Iterator[str]:
    """Two sets; the second by model, and with tensor parallelism or without."""
    title = "32 V100s, Megatron-LM of March 2021 (Oneflow-Inc/DLPerf; not fitted)"
    yield from parted(title, list(measured.dlperf(folder)), {})
    title = "V100s, GPT and BERT of 24 and 48 layers, h=1024, Megatron-LM before Core (Oneflow-Inc/libai; not fitted)"
    parts = {
        "gpt": lambda row: row.model.kind is Kind.GPT,
        "bert": lambda row: row.model.kind is Kind.BERT,
        "t=1": lambda row: row.layout.tensor == 1,
        "t=2 to 8": lambda row: row.layout.tensor > 1,
    }
    yield from parted(title, list(measured_libai.times(folder)), parts)


def vocabularies(folder: Path) -> Iterator[str]:
    """By GPUs, and by tokens."""
    title = "A100, pipelines alone, vocabularies to 256,000, fused attention (Yeung et al., Table 5; not fitted)"
    parts = {
        "8 GPUs": lambda row: row.layout.gpus == 8,
        "16 GPUs": lambda row: row.layout.gpus == 16,
        "32 GPUs": lambda row: row.layout.gpus == 32,
        "2,048 tokens": lambda row: row.model.seq_length == 2048,
        "4,096 tokens": lambda row: row.model.seq_length == 4096,
    }
    yield from parted(title, list(measured_vocabularies.times(folder)), parts)


def aleph_alpha(folder: Path) -> Iterator[str]:
    """In all, by tensor-parallel size and by what is compared with each other."""
    yield from ("", "Llama, 13B to 65B, on 32 to 256 A100s, fused attention (Hagemann et al.; not fitted)", HEADING)
    rows = list(measured.aleph_alpha(folder))
    yield Accuracy.of(predicted_s, rows).line("all rows")
    for tensor in sorted({row.layout.tensor for row in rows}):
        yield Accuracy.of(predicted_s, [row for row in rows if row.layout.tensor == tensor]).line(f"t={tensor}")
    groups = by_group(rows).items()
    yield from (Accuracy.of(predicted_s, alike).line(group) for group, alike in groups if len(alike) > 1)
    yield from (_as_stated(rows), _not_to_fit(rows))


def memory_lines(folder: Path) -> Iterator[str]:
    yield from (
        "",
        "Most memory that torch had allocated (GB); nothing fitted but one constant, on the four trained Mixtrals",
    )
    for row in (*measured.memory(folder), *measured_deepseek.memory(folder)):
        stages = memory.stages(row.model, row.layout)
        needed = [stage.allocated_bytes for stage in stages]
        predicted = needed[row.stage] if row.stage is not None else max(needed)
        yield (
            f"{row.name:<44} {predicted / 1e9:>8.1f}, measured {row.measured / 1e9:>6.1f} "
            f"({predicted / row.measured - 1:+.1%})"
        )
    yield from SCRATCH_NOTE
    yield from vocabularies_memory(folder)
    ran = [row for which in ("multi_node", "single_node") for row in _priced(measured.vtrain(which, folder))[0]]
    yield f"vTrain's layouts, on 80 GB: {_not_to_fit(ran)}"


def vocabularies_memory(folder: Path) -> Iterator[str]:
    """How far off it is on the fullest stage, and where a GPU with just as much would be said to do."""
    rows = list(measured_vocabularies.memory(folder))
    for gpus in sorted({row.layout.gpus for row in rows}):
        alike = [row for row in rows if row.layout.gpus == gpus]
        needed = [max(stage.allocated_bytes for stage in memory.stages(row.model, row.layout)) for row in alike]
        off = [predicted / row.measured - 1 for predicted, row in zip(needed, alike, strict=True)]
        most = max(row.measured for row in alike) / 1e9
        name = f"pipelines of {gpus} (Yeung et al.), to {most:.1f} GB"
        mean = statistics.mean(off)
        yield f"{name:<44} {len(off):>3} rows, {min(off):+.1%} to {max(off):+.1%}, {mean:+.1%} on average"
    too_little = sum(memory.largest(row.model, row.layout).total_bytes < row.measured for row in rows)
    yield f"Said to fit in less than was allocated: {too_little} of {len(rows)}."


def published_memory(folder: Path) -> Iterator[str]:
    """How many of NVIDIA's runs are said not to fit, though they ran; how much they took is not published."""
    rows = [*measured_fp8.nemo(folder), *measured_fp8.long_sequences(folder), *measured_fp8.bridge(folder)]
    yield _not_to_fit([*rows, *measured_dgxc.steps(folder), *measured_experts.many_experts(folder)])


def _not_to_fit(rows: list[Row]) -> str:
    refused = [row.name for row in rows if memory.largest(row.model, row.layout).total_bytes > row.cluster.memory_bytes]
    named = f" ({'; '.join(refused)})" if refused else ""
    return f"Said not to fit, though they ran: {len(refused)} of {len(rows)}{named}."


def report(folder: Path) -> Iterator[str]:
    """All lines."""
    yield f"python {' '.join(sys.argv)}"
    yield "MAPE, median, most: of |predicted/measured - 1|; Spearman: over the rows; regret: of the row predicted to be"
    yield "the fastest of its model, GPUs and batch over the one that was, the largest of all groups"
    multi = "vTrain, multi-node: 18.4B on 256 A100s (fitted), others (not)"
    yield from vtrain("multi_node", multi, folder)
    yield from scatter(folder)
    yield from vtrain("single_node", "vTrain, single-node: one model on 8 A100s (fitted), on 2 and 4 (not)", folder)
    yield from PUBLISHED
    yield from layer_times(folder)
    yield from single("Whole batches (Korthikanti et al., Table 5; not fitted)", measured.korthikanti(folder))
    yield from single(
        "1F1B with uneven stages (Qi et al., zero bubble, Table 4; not fitted)", measured.zero_bubble(folder)
    )
    sc21 = measured_tables.sc21(folder), measured_tables.sc21_table_2(folder)
    yield from single("Interleaved (Narayanan et al., 2021, Table 1; best microbatch and chunks; not fitted)", sc21[0])
    yield from single("PTD-P (Narayanan et al., 2021, Table 2; best chunks; not fitted)", sc21[1])
    mt_nlg = measured_tables.mt_nlg(folder)
    yield from single("Megatron-DeepSpeed (Smith et al., MT-NLG 530B, section 2.4; not fitted)", mt_nlg)
    yield from bigscience(folder)
    yield from aleph_alpha(folder)
    yield from vocabularies(folder)
    yield from v100s(folder)
    yield from single(
        "H100, fused attention (Megatron-LM's table; best microbatch and chunks; not fitted)", measured_tables.h100s()
    )
    in_8_bits = "H100, products in 8 bits (NeMo 24.07; not fitted)"
    yield from single(in_8_bits, measured_fp8.nemo(folder))
    yield from long_sequences(folder)
    yield from single(
        "H100, B200, GB200, GB300, products in 8 bits (Megatron-Bridge; not fitted)", measured_fp8.bridge(folder)
    )
    yield from ranges("H100, GB200, 8 to 2,048 GPUs (dgxc-benchmarking; not fitted)", measured_dgxc.steps(folder))
    many = "128 and 256 experts, on 8 to 1,024 GPUs (Megatron-Bridge, Megatron-MoE-ModelZoo; not fitted)"
    yield from ranges(many, measured_experts.many_experts(folder))
    yield from published_memory(folder)
    golden = "Interleaved, fused attention, deterministic kernels (Megatron's own test case; not fitted)"
    yield from single(golden, measured.golden_times(folder))
    experts = "Experts in parallel, H100 (Megatron's own test cases, Mixtral; times not fitted)"
    yield from single(experts, measured.mixtral_times(folder))
    latent = "Latent attention, shared experts, a further token predicted (Megatron's own test cases; not fitted)"
    yield from single(latent, measured_deepseek.times(folder))
    yield from memory_lines(folder)
    yield from ("", "Not priced, and so without a line here", *UNPRICED)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=measured.DATA, help="folder with files of the same names")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(argv)
    text = "\n".join([*report(options.data), ""])
    print(text)
    if options.output is not None:
        options.output.write_text(text)


if __name__ == "__main__":
    main()
