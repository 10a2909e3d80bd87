"""The quick start's training once more, as a loop of delay-1 training in one process.

    python scripts/quickstart_oracle.py [quickstart/arguments]

Prints the last validation loss, to hold against the one that ``scripts/quickstart.sh`` ends with.
Model, data and optimizer are Megatron's, without a pipeline; the delay is written out below.
Initial weights are drawn once for the whole model, not per stage, so losses agree in the second or
third digit, not to the last bit; tests/mcore proves equality.
"""

from __future__ import annotations

import os
import sys
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

    args = get_args()
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
        print(f"validation loss {losses(valid_data, microbatches, forward_only=True):.4f}")
    raise SystemExit(0)


def main() -> None:
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="29513")
    file = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "quickstart/arguments"
    flags = file.read_text(encoding="utf-8").splitlines()
    for name in ("--pipeline-trace", "--save"):
        if name in flags:
            at = flags.index(name)
            del flags[at : at + 2]
    sys.argv = ["quickstart_oracle.py", *flags, *OVERRIDES]
    sys.path.insert(0, str(ROOT / "examples"))
    import pretrain_gpt

    with mock.patch("megatron.training.training.train", train_with_delay):
        pretrain_gpt.main()


if __name__ == "__main__":
    main()
