"""The quick start's training as a loop of delay-1 training in one process, and as a pipeline.

    python scripts/quickstart_oracle.py [quickstart/arguments]

Prints the last validation loss of both; the pipeline starts from the loop's initial weights, which
are another draw than those of ``scripts/quickstart.sh`` (Megatron draws them stage by stage).
Model, data and optimizer of the loop are Megatron's, without a pipeline; the delay is written out
below. Tied embeddings and clipping leave differences of rounding; tests/mcore proves equality.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from multiprocessing import Process
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parents[1]
OVERRIDES = "--pipeline-model-parallel-size 1 --pipeline-schedule megatron --rerun-mode disabled".split()


def train_with_delay(forward_step_func, model, optimizer, scheduler, train_data, valid_data, *_args, **_keywords):
    """W(t+1) = W(t) - lr(t) * u(grad f(W(max(t-1, 0)))); then the validation loss of the last weights."""
    import torch
    from megatron.core.num_microbatches_calculator import get_num_microbatches
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.training import get_args
    from megatron.training.checkpointing import save_checkpoint

    args = get_args()
    save_checkpoint(0, model, optimizer, scheduler, 0)
    parameters = list(model[0].parameters())
    shape = {"seq_length": args.seq_length, "micro_batch_size": args.micro_batch_size}

    def losses(data, microbatches, *, forward_only):
        keywords = {"forward_step_func": forward_step_func, "data_iterator": data, "model": model, **shape}
        step = get_forward_backward_func()
        parts = step(num_microbatches=microbatches, forward_only=forward_only, **keywords)
        total = torch.stack([part["lm loss"].double() for part in parts]).sum(dim=0)
        return (total[0] / total[1]).item()

    def load(weights):
        for parameter, weight in zip(parameters, weights, strict=True):
            parameter.data.copy_(weight)

    def copy():
        return [parameter.detach().clone() for parameter in parameters]

    older = newest = copy()
    for batch in range(args.train_iters):
        load(older)
        model[0].zero_grad_buffer()
        loss = losses(train_data, get_num_microbatches(), forward_only=False)
        model[0].finish_grad_sync()
        load(newest)
        optimizer.step()
        scheduler.step(increment=args.global_batch_size)
        older, newest = newest, copy()
        if batch % 40 == 0:
            print(f"batch {batch}: loss {loss:.4f}", flush=True)
    model[0].eval()
    with torch.no_grad():
        microbatches = args.eval_iters * get_num_microbatches()
        for _ in range(args.train_iters // args.eval_interval):  # The evaluations during the quick start's run.
            losses(valid_data, microbatches, forward_only=True)
        print(f"the loop's validation loss: {losses(valid_data, microbatches, forward_only=True):.6f}", flush=True)
    raise SystemExit(0)


def train_pipeline(flags: list[str], initial: str) -> None:
    """The same training under the flags' schedule, from the loop's initial weights."""
    ranks = flags[flags.index("--pipeline-model-parallel-size") + 1]
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks),
            *("-m", "megatron_2bw", str(ROOT / "examples/pretrain_gpt.py"), *flags, "--load", initial, "--finetune"),
        ],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(f"the pipeline failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    last = re.findall(r"lm loss value: (\S+)", done.stdout)[-1]
    print(f"the pipeline's validation loss: {float(last):.6f}")


def train_loop(flags: list[str], initial: str) -> None:
    """Delay-1 training in this process; saves its initial weights."""
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="29513")
    sys.argv = ["quickstart_oracle.py", *flags, *OVERRIDES, "--save", initial]
    sys.path.insert(0, str(ROOT / "examples"))
    import pretrain_gpt

    with mock.patch("megatron.training.training.train", train_with_delay):
        pretrain_gpt.main()


def main() -> None:
    file = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "quickstart/arguments"
    flags = file.read_text(encoding="utf-8").splitlines()
    for name in ("--pipeline-trace", "--save"):
        if name in flags:
            at = flags.index(name)
            del flags[at : at + 2]
    with tempfile.TemporaryDirectory() as initial:
        loop = Process(target=train_loop, args=(flags, initial))
        loop.start()
        loop.join()
        if loop.exitcode != 0:
            raise SystemExit(loop.exitcode)
        train_pipeline(flags, initial)


if __name__ == "__main__":
    main()
