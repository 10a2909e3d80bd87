"""Seconds of training until the loss that Megatron's schedules end with: 2BW against them, on two ranks, end to end.

    python scripts/bench/time_to_loss_ranks.py train [--minutes 60]
    python scripts/bench/time_to_loss_ranks.py report [--output scripts/bench/results/time_to_loss_ranks.txt]

A GPT on the bytes that time_to_loss.py trains with, m = d = 2, under Muon: Megatron's 1F1B, its interleaved schedule,
and 2BW as the README recommends it, with a lead, after a fifth of the batches without a delay. ``train`` goes on where
it was stopped; each finished job is a line of the file ``--trials``. Every arm has the momentum that was best in
time_to_loss.py and tries the same learning rates with one seed; 1F1B computes what the interleaved schedule does, takes
its rate, and both together set the loss to reach. Then each runs its best with all seeds, the arms in turn. 2BW gets a
twentieth more batches. Starting, evaluating and the writing of checkpoints are left out of the times. Losses are means
over the seeds, times medians.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from kept import Kept
from language_models import PYTHON, texts
from report import heading, put

from megatron_2bw.planner.measure.torchrun import LOGGED

ROOT = Path(__file__).resolve().parents[2]
TRIALS = Path(__file__).parent / "results" / "time_to_loss_ranks.jsonl"
STAGES, MICROBATCHES, MICROBATCH = 2, 2, 16
LAYERS, HIDDEN, SEQUENCE = 4, 128, 64
BATCHES = 1000
EVALUATIONS = 10
"""In a run: they use the same samples in all arms, each its own."""
SEEDS = (1, 2, 3)
RATES = (8e-3, 1.6e-2, 3.2e-2)
COMMON = (
    *f"--num-layers {LAYERS} --hidden-size {HIDDEN} --num-attention-heads 4 --seq-length {SEQUENCE}".split(),
    *f"--max-position-embeddings {SEQUENCE} --attention-dropout 0 --hidden-dropout 0".split(),
    *"--transformer-impl local --no-persist-layer-norm --no-gradient-accumulation-fusion".split(),
    *f"--no-masked-softmax-fusion --pipeline-model-parallel-size {STAGES} --micro-batch-size {MICROBATCH}".split(),
    *f"--global-batch-size {MICROBATCHES * MICROBATCH} --distributed-backend gloo --lr-decay-style cosine".split(),
    *"--lr-warmup-fraction 0.1 --weight-decay 0.1 --optimizer muon --adam-beta2 0.95".split(),
    *"--muon-extra-scale-factor 0.2 --muon-fp32-matmul-prec high --clip-grad 1.0".split(),
    *"--eval-iters 20 --tokenizer-type NullTokenizer --vocab-size 256 --make-vocab-size-divisible-by 256".split(),
    *"--num-workers 0 --no-create-attention-mask-in-dataloader --no-check-for-nan-in-loss-and-grad".split(),
)
TUNED_AS = {"1F1B": "interleaved, 2 chunks"}
"""Arms that compute the same: what Megatron's schedules end with."""
_VALIDATION = re.compile(r"validation loss at iteration (\d+) \| lm loss value: (\S+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """A way to train."""

    batches: int
    flags: tuple[str, ...]


SYNCHRONOUS = ("--muon-momentum", "0.8", "--muon-nesterov")
ARMS = {
    "1F1B": Arm(batches=BATCHES, flags=SYNCHRONOUS),
    "interleaved, 2 chunks": Arm(
        batches=BATCHES,
        flags=(*SYNCHRONOUS, "--num-virtual-stages-per-pipeline-rank", "2"),
    ),
    "2bw, lead 2, after 20%": Arm(
        batches=BATCHES * 21 // 20,
        flags=(
            *"--muon-momentum 0.9 --adam-beta1 0.93 --delay-correction lead --delay-lead 2".split(),
            *f"--pipeline-schedule 2bw --synchronous-warmup-iters {BATCHES // 5}".split(),
        ),
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One run."""

    arm: str
    lr: float
    seed: int
    batches: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """What came of it."""

    seconds: dict[int, float]
    """Of training, up to each evaluation."""
    losses: dict[int, float]
    """On validation data, after so many batches."""

    @property
    def end(self) -> float:
        """The last loss."""
        return list(self.losses.values())[-1]


class Jobs:
    """What has been trained, in a file.

    Args:
        path: one JSON object per line.
    """

    def __init__(self, path: Path) -> None:
        self._kept = Kept(path)
        self._trained = {Job(**row["job"]): _trained(row) for row in self._kept.rows()}

    def add(self, job: Job, trained: Trained) -> None:
        """Keep a finished job."""
        self._trained[job] = trained
        self._kept.add({"job": asdict(job), **asdict(trained)})

    def missing(self) -> Iterator[Job]:
        """In the order in which they are to be run, as far as it is known now."""
        first = (self.job(name, rate, SEEDS[0]) for name in ARMS if name not in TUNED_AS for rate in RATES)
        yield from (job for job in first if job not in self._trained)
        best = [(name, self.best(name)) for name in ARMS]
        more = (self.job(name, rate, seed) for seed in SEEDS for name, rate in best if rate is not None)
        yield from (job for job in more if job not in self._trained)

    def job(self, arm: str, rate: float, seed: int) -> Job:
        """Of an arm."""
        return Job(arm=arm, lr=rate, seed=seed, batches=ARMS[arm].batches)

    def best(self, arm: str) -> float | None:
        """Its best learning rate with the first seed; None while one has not been tried."""
        tried = {rate: self._trained.get(self.job(TUNED_AS.get(arm, arm), rate, SEEDS[0])) for rate in RATES}
        if None in tried.values():
            return None
        return min(tried, key=lambda rate: (math.isnan(tried[rate].end), tried[rate].end))

    def trained(self, arm: str, rate: float) -> list[Trained]:
        """By all seeds that have been tried."""
        found = (self._trained.get(self.job(arm, rate, seed)) for seed in SEEDS)
        return [trained for trained in found if trained is not None]


def _trained(row: dict) -> Trained:
    return Trained(
        **{name: {int(batch): value for batch, value in row[name].items()} for name in ("seconds", "losses")}
    )


def write_data(folder: Path) -> None:
    """The bytes of time_to_loss.py's corpus as tokens, in Megatron's format: ``training`` and ``validation``."""
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    for name, text in zip(("training", "validation"), texts(PYTHON), strict=True):
        builder = IndexedDatasetBuilder(str(folder / f"{name}.bin"), dtype=DType.optimal_dtype(256))
        builder.add_document(text.numpy(), [len(text)])
        builder.finalize(str(folder / f"{name}.idx"))


def train(job: Job, data: Path) -> Trained:
    """Run it to its end."""
    files = ("--train-data-path", str(data / "training"), "--valid-data-path", str(data / "validation"))
    every = job.batches // EVALUATIONS
    numbers = f"--train-iters {job.batches} --eval-interval {every} --log-interval {every} --seed {job.seed}".split()
    rates = f"--lr {job.lr} --min-lr {job.lr / 10}".split()
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(STAGES))
    script = ("-m", "megatron_2bw", str(ROOT / "examples" / "pretrain_gpt.py"))
    ended = subprocess.run(
        [*launcher, *script, *COMMON, *files, "--data-cache-path", str(data), *numbers, *rates, *ARMS[job.arm].flags],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
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
    for batch, ms in ((int(found[1]), float(found[2])) for found in LOGGED.finditer(output)):
        if batch == 1:  # The next line's mean has it, too.
            continue
        total_s += (batch - before) * ms / 1000
        seconds[batch], before = total_s, batch
    losses = {int(found[1]): float(found[2]) for found in _VALIDATION.finditer(output)}
    return Trained(seconds={batch: seconds[batch] for batch in losses}, losses=losses)


def setting() -> str:
    """What all arms train."""
    layers = f"GPT, {LAYERS} layers of {HIDDEN}, sequences of {SEQUENCE} bytes of {PYTHON}"
    return f"{layers}, {MICROBATCHES} microbatches of {MICROBATCH}"


def report(jobs: Jobs) -> list[str]:
    """A table; the loss to reach is the mean that Megatron's schedules end with."""
    best = {name: jobs.best(name) for name in ARMS}
    found = {name: jobs.trained(name, rate) for name, rate in best.items() if rate is not None}
    found = {name: of_arm for name, of_arm in found.items() if of_arm}
    synchronous = {*TUNED_AS, *TUNED_AS.values()}
    ends = [trained.end for name in synchronous for trained in found.get(name, [])]
    target = statistics.mean(ends) if ends else -math.inf
    lines = [
        f"{'':<24} {'lr':>7} {'batches':>7} {'s per batch':>11} {'loss at end':>11} {f'batches to {target:.3f}':>16} "
        f"{'seconds':>8}  loss at end by seed",
    ]
    for name, of_arm in found.items():
        arm, rate = ARMS[name], best[name]
        s_per_batch = statistics.median(trained.seconds[arm.batches] / arm.batches for trained in of_arm)
        whole = (arm.batches, statistics.median(trained.seconds[arm.batches] for trained in of_arm))
        reached = whole if name in synchronous else _reached(of_arm, target)
        when = f"{'-':>16} {'-':>8}" if reached is None else f"{reached[0]:>16} {reached[1]:>8.1f}"
        edge = "*" if rate in (RATES[0], RATES[-1]) else ""
        lines.append(
            f"{name:<24} {f'{rate:g}{edge}':>7} {arm.batches:>7} {s_per_batch:>11.3f} "
            f"{statistics.mean(trained.end for trained in of_arm):>11.3f} {when}  "
            f"{' '.join(f'{trained.end:.3f}' for trained in of_arm)}"
        )
    lines += ["", "Loss at end by learning rate, first seed; * above: the best of them is at their edge."]
    for name in (name for name in ARMS if name not in TUNED_AS):
        tried = [jobs.trained(name, rate)[:1] for rate in RATES]
        cells = (f"{rate:g}: {t[0].end:.3f}" for rate, t in zip(RATES, tried, strict=True) if t)
        lines.append(f"{name:<24} {', '.join(cells)}")
    return lines


def _reached(of_arm: Sequence[Trained], target: float) -> tuple[int, float] | None:
    """Batches and median seconds until the mean loss is as good, and stays so; None if it does not."""
    batches = list(of_arm[0].losses)
    means = [statistics.mean(trained.losses[batch] for trained in of_arm) for batch in batches]
    good = list(itertools.takewhile(lambda pair: pair[1] <= target, reversed(list(zip(batches, means, strict=True)))))
    if not good:
        return None
    batch = good[-1][0]
    return batch, statistics.median(trained.seconds[batch] for trained in of_arm)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["train", "report"])
    parser.add_argument("--trials", type=Path, default=TRIALS)
    parser.add_argument("--minutes", type=float, default=60.0, help="start no job later")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    jobs = Jobs(options.trials)
    if options.command == "train":
        end_s = time.monotonic() + 60 * options.minutes
        with tempfile.TemporaryDirectory() as data:
            write_data(Path(data))
            while time.monotonic() < end_s and (job := next(jobs.missing(), None)) is not None:
                trained = train(job, Path(data))
                jobs.add(job, trained)
                print(f"{job.arm}, lr {job.lr:g}, seed {job.seed}: {trained.end:.3f}", flush=True)
        return
    put([*heading(), "", setting(), *report(jobs)], options.output)


if __name__ == "__main__":
    main()
