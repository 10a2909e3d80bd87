"""Seconds of training until the loss that Megatron's schedules end with: 2BW against them, on two ranks, end to end.

    scripts/quickstart.sh && python scripts/bench/time_to_loss_ranks.py [--output scripts/bench/results/FILE]

The same GPT on the text of the quick start, m = d = 2, Muon with the same settings: Megatron's 1F1B, its interleaved
schedule, 2BW with the correction that the README recommends, which gets a fifth more batches, and the same after a
fifth of the batches without a delay, which gets a twentieth more. One job after the other; evaluation, the start and
the saving of checkpoints are left out of the times.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from report import heading

ROOT = Path(__file__).resolve().parents[2]
STAGES, MICROBATCHES, MICROBATCH = 2, 2, 4
BATCHES = 600
EVALUATED_EVERY = 25
LOGGED_EVERY = 5
COMMON = (
    *"--num-layers 8 --hidden-size 128 --num-attention-heads 4 --seq-length 128".split(),
    *"--max-position-embeddings 128 --attention-dropout 0 --hidden-dropout 0 --transformer-impl local".split(),
    *"--no-persist-layer-norm --no-gradient-accumulation-fusion --no-masked-softmax-fusion".split(),
    *f"--pipeline-model-parallel-size {STAGES} --micro-batch-size {MICROBATCH}".split(),
    *f"--global-batch-size {MICROBATCHES * MICROBATCH} --seed 1234 --distributed-backend gloo".split(),
    *"--lr 1.6e-2 --min-lr 1.6e-3 --lr-decay-style cosine --lr-warmup-fraction 0.1 --weight-decay 0.1".split(),
    *"--optimizer muon --muon-momentum 0.9 --muon-extra-scale-factor 0.2 --muon-fp32-matmul-prec high".split(),
    *f"--adam-beta2 0.95 --clip-grad 1.0 --log-interval {LOGGED_EVERY} --eval-interval {EVALUATED_EVERY}".split(),
    *"--eval-iters 10 --split 90,10,0 --tokenizer-type GPTSentencePieceTokenizer --num-workers 0".split(),
    "--no-create-attention-mask-in-dataloader",
)
WITH_LEAD = ("--pipeline-schedule", "2bw", "--delay-correction", "lead", "--adam-beta1", "0.93")
ARMS = {
    "1F1B": (BATCHES, ("--muon-nesterov",)),
    "interleaved, 2 chunks": (BATCHES, ("--muon-nesterov", "--num-virtual-stages-per-pipeline-rank", "2")),
    "2bw, lead 2": (BATCHES * 6 // 5, WITH_LEAD),
    "2bw, lead 2, after 20%": (BATCHES * 21 // 20, (*WITH_LEAD, "--synchronous-warmup-iters", str(BATCHES // 5))),
}
"""Batches, and the flags that differ."""
_ITERATION = re.compile(r"iteration +(\d+)/ +\d+ .*elapsed time per iteration \(ms\): ([\d.]+)")
_VALIDATION = re.compile(r"validation loss at iteration (\d+) \| lm loss value: (\S+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """One job."""

    seconds: dict[int, float]
    """Of training, up to each logged batch."""
    losses: dict[int, float]
    """On validation data, after so many batches."""

    def until(self, loss: float) -> tuple[int, float] | None:
        """Batches and seconds to the first evaluation that is as good; None if none is."""
        return next(((batch, self.seconds[batch]) for batch, found in self.losses.items() if found <= loss), None)


def train(batches: int, flags: tuple[str, ...], data: Path) -> Trained:
    """Run one job to its end."""
    files = ("--data-path", str(data / "gpt_document"), "--tokenizer-model", str(data / "gpt.model"))
    cache = ("--data-cache-path", str(data / "cache"), "--train-iters", str(batches))
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(STAGES))
    script = ("-m", "megatron_2bw", str(ROOT / "examples" / "pretrain_gpt.py"))
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(
        [*launcher, *script, *COMMON, *files, *cache, *flags],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if ended.returncode:
        raise RuntimeError(ended.stdout[-4000:])
    return read(ended.stdout)


def read(output: str) -> Trained:
    """From what Megatron logs."""
    seconds, total_s, before = {}, 0.0, 0
    for batch, ms in ((int(found[1]), float(found[2])) for found in _ITERATION.finditer(output)):
        total_s += (batch - before) * ms / 1000
        seconds[batch], before = total_s, batch
    return Trained(seconds=seconds, losses={int(found[1]): float(found[2]) for found in _VALIDATION.finditer(output)})


def report(trained: dict[str, Trained]) -> list[str]:
    """A table; the loss to reach is the best that a schedule of Megatron's ends with."""
    ends = {name: list(job.losses.values())[-1] for name, job in trained.items()}
    target = min(ends["1F1B"], ends["interleaved, 2 chunks"])
    lines = [
        f"{'':<24} {'batches':>7} {'s per batch':>11} {'loss at end':>11} {'batches to ' + f'{target:.3f}':>17} "
        f"{'seconds':>8}"
    ]
    for name, job in trained.items():
        batches, total_s = list(job.seconds.items())[-1]
        reached = job.until(target)
        found = f"{'-':>17} {'-':>8}" if reached is None else f"{reached[0]:>17} {reached[1]:>8.1f}"
        lines.append(f"{name:<24} {batches:>7} {total_s / batches:>11.3f} {ends[name]:>11.3f} {found}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=ROOT / "quickstart" / "data")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    trained = {}
    for name, (batches, flags) in ARMS.items():
        trained[name] = train(batches, flags, options.data)
        print(f"{name}: done", flush=True)
    lines = [*heading(), "", f"GPT, 8 layers of 128, sequences of 128, {MICROBATCHES} microbatches of {MICROBATCH}"]
    text = "\n".join([*lines, *report(trained), ""])
    print(text)
    if options.output is not None:
        options.output.write_text(text)


if __name__ == "__main__":
    main()
