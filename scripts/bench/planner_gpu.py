"""Does the planner know this GPU? Times layers of a GPT on one, trains the whole GPT, and compares.

    python scripts/bench/planner_gpu.py [--output scripts/bench/results/planner_gpu.txt]
    python scripts/bench/planner_gpu.py --model llama3-8b --layers 8 --global-batch-size 4 --microbatch 2

The time of a batch is predicted twice, by the GPU's data sheet, as ``megatron-2bw plan`` does for a cluster, and by the
profile of the layers; what is measured is the median of Megatron's log lines behind the first iterations. The memory
that is measured is what torch had allocated at most.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from kernels import flags_without_kernels
from report import heading, is_installed, put_each

from megatron_2bw.planner.measure.profile import Setting
from megatron_2bw.planner.measure.profiling import Request, measure
from megatron_2bw.planner.measure.torchrun import LOGGED, lines_of, random_data
from megatron_2bw.planner.measure.verify import later_times_s
from megatron_2bw.planner.naming import name
from megatron_2bw.planner.report.report import flags_of
from megatron_2bw.planner.search.finder import Choice, price
from megatron_2bw.planner.specs.cluster import CLUSTERS, GPUS, Cluster
from megatron_2bw.planner.specs.layout import Layout, Precision, Recompute
from megatron_2bw.planner.specs.model import Model
from megatron_2bw.planner.specs.models import MODELS
from megatron_2bw.planner.table import gib, seconds

MODEL = Model(
    num_layers=16,
    hidden_size=2048,
    num_attention_heads=16,
    seq_length=2048,
    vocab_size=32768,
    dropout=False,
    name="GPT, hidden 2048, sequence 2048, vocabulary 32768",
)
LOG_INTERVAL = 3
TRAINING = (
    f"--train-iters 9 --log-interval {LOG_INTERVAL} --lr 1e-5 --clip-grad 1.0 --eval-iters 0 --eval-interval 1000000 "
    "--num-workers 0 --rerun-mode disabled"
).split()
ALLOCATED = re.compile(r"max allocated: ([\d.]+)")
"""MiB, in Megatron's log."""
EXAMPLE = Path(__file__).parents[2] / "examples" / "pretrain_gpt.py"


TITLES = ("microbatch", "measured", "TFLOP/s", "by profile", "by data sheet", "allocated/GiB", "predicted")


def of_data_sheet(device: str, memory_gb: float) -> Cluster | None:
    """One such GPU; None if the planner has no data sheet of it."""
    words = re.split(r"[ -]", device.lower())
    known = [gpu for name, gpu in GPUS.items() if name.partition("-")[0] in words]
    gpu = min(known, key=lambda gpu: abs(gpu.memory_gb - memory_gb), default=None)
    return gpu and replace(CLUSTERS["dgx-h100"], gpu=gpu, gpus_per_node=1)


def ran(model: Model, layout: Layout, more_flags: list[str]) -> tuple[float, float]:
    """Seconds of a batch and bytes allocated at most."""
    flags = [*flags_of(model, layout), *TRAINING, *random_data(model), *more_flags]
    start_s, lines = time.monotonic(), []
    for line in lines_of(["-m", "megatron_2bw", str(EXAMPLE), *flags], ranks=1, what=name(layout)):
        lines.append(line)
        if done := LOGGED.search(line):  # Who stops this sees how far it came.
            print(f"{time.monotonic() - start_s:.0f} s: iteration {done[1]}, {done[2]} ms", file=sys.stderr)
    allocated = [float(found[1]) * 2**20 for line in lines if (found := ALLOCATED.search(line))]
    return median(later_times_s(lines, LOG_INTERVAL)), max(allocated)


def off(predicted: float, measured: float) -> str:
    return f"{predicted / measured - 1:+.1%}"


def compared(model: Model, global_batch: int, microbatch: int, fused: bool, more_flags: list[str]) -> Iterator[str]:
    """Profile, then a row for microbatches of one, and one for those of ``microbatch``; nothing is recomputed."""
    sizes = tuple(sorted({1, microbatch}))
    setting = Setting(ranks=1, precision=Precision.BF16, fused_attention=fused, sequence_parallel=False)
    request = Request(
        model=model,
        setting=setting,
        tensors=(1,),
        microbatches=sizes,
        recomputes=(Recompute.NONE,),
        more_flags=tuple(more_flags),
    )
    with tempfile.TemporaryDirectory() as folder:
        profiled = measure(request, Path(folder) / "profile.json").cluster()
    sheet = of_data_sheet(profiled.gpu.name, profiled.gpu.memory_gb)
    yield " ".join(f"{title:>14}" for title in TITLES)
    for size in sizes:
        layout = replace(request.layout(1, size, Recompute.NONE), global_batch=global_batch)
        measured_s, allocated_bytes = ran(model, layout, more_flags)
        by_profile = price(model, layout, profiled)
        by_sheet: Choice | None = sheet and price(model, layout, sheet)
        cells = (
            f"b={size}",
            seconds(measured_s),
            f"{by_profile.iteration.flops_per_gpu_s * by_profile.iteration.time_s / measured_s / 1e12:.0f}",
            off(by_profile.iteration.time_s, measured_s),
            off(by_sheet.iteration.time_s, measured_s) if by_sheet else "",
            gib(allocated_bytes),
            off(by_profile.memory.allocated_bytes, allocated_bytes),
        )
        yield " ".join(f"{cell:>14}" for cell in cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--model", choices=MODELS, help=f"default: {MODEL.name}")
    parser.add_argument("--layers", type=int, help="in place of the model's own number of them")
    parser.add_argument("--global-batch-size", type=int, default=8, help="sequences")
    parser.add_argument("--microbatch", type=int, default=4, help="sequences, beside one")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this machine has no CUDA device; scripts/bench/planner_here.py compares on CPUs")
    has_engine = importlib.util.find_spec("transformer_engine") is not None
    kernels = "Transformer Engine" if has_engine else "Megatron's own layers, attention unfused"
    model = MODELS[options.model] if options.model else MODEL
    if options.layers:
        model = replace(model, num_layers=options.layers)
    about = f"{model.name}, {model.num_layers} layers, batches of {options.global_batch_size}, bf16, {kernels}, one GPU"
    begin = [*heading(*filter(is_installed, ("transformer-engine", "apex"))), "", about, ""]
    rows = compared(model, options.global_batch_size, options.microbatch, has_engine, flags_without_kernels())
    put_each(chain(begin, rows), options.output)


if __name__ == "__main__":
    main()
