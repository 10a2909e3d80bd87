"""One rank of a test run: Megatron's own ``pretrain`` on the small GPT."""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from . import faults, stand_ins
from .case import Case


def main(case: Case, rank: int, port: int, folder: Path) -> None:
    """Run ``case`` as ``rank`` and write what it recorded to ``folder``."""
    set_environment(rank, case.ranks, port)
    faults.before_install(case, rank)
    install(case)
    train(case, rank, folder)


def with_steps(changed: Callable[..., Any], case: Case, rank: int, port: int, folder: Path) -> None:
    """`main`; what each forward step returns goes through ``changed``, with the model behind it."""
    before_forward = faults.before_forward

    def prepared(*args: Any) -> Any:
        step = before_forward(*args)
        return lambda data, model: changed(*step(data, model), model)

    faults.before_forward = prepared
    main(case, rank, port, folder)


def train(case: Case, rank: int, folder: Path) -> None:
    """What a user's training script does; the extension is loaded or not already."""
    from megatron.training.arguments import parse_and_validate_args

    from .record import RankRecord, record_actions, record_updates

    sys.argv = ["pretrain_small_gpt.py", *case.arguments()]
    args = parse_and_validate_args()
    stand_ins.install(case, args)
    record = RankRecord()
    models: list[Any] = []
    optimizers = record_updates(case, record, models)
    if case.record_actions:
        record_actions(record)
    faults.before_training(case, rank)
    if "--save" in case.flags:
        _start_queue_of_writers()
    with _ended_by_exit():
        step = faults.before_forward(case, rank, partial(forward_step, case.kind, record))
        pretrain(case, args, step, partial(provide, case.kind, record, models))
    if case.precision != "fp32":
        record.main = optimizers.main_weights()
    write(record, models[0], folder / f"rank{rank}.pt")


def pretrain(case: Case, args: Any, forward_step_func: Any, model_provider: Any) -> None:
    """Megatron's, as a user's script calls it."""
    from megatron import training
    from megatron.core.enums import ModelType
    from megatron.training.argument_utils import pretrain_cfg_container_from_args

    from .model import datasets

    container = pretrain_cfg_container_from_args(args)
    training.pretrain(
        container,
        datasets(case.kind),
        model_type=ModelType.encoder_or_decoder,
        forward_step_func=forward_step_func,
        model_provider=model_provider,
    )


def _start_queue_of_writers() -> None:
    """By forking; Megatron would start a new interpreter for it at its first save, which takes seconds."""
    from megatron.core.dist_checkpointing.strategies.filesystem_async import get_write_results_queue

    get_write_results_queue(mp_mode="fork")


@contextmanager
def _ended_by_exit() -> Iterator[None]:
    """Megatron's training loop leaves by ``sys.exit(0)`` when it is told to stop early."""
    try:
        yield
    except SystemExit as exit_:
        if exit_.code:
            raise


def through_launcher(case: Case, rank: int, port: int, folder: Path) -> None:
    """Run ``case`` as ``python -m megatron_2bw SCRIPT`` does."""
    set_environment(rank, case.ranks, port)
    faults.before_install(case, rank)
    from megatron_2bw.__main__ import main as launcher

    script = Path(__file__).with_name("script.py")
    sys.argv = ["megatron_2bw", str(script), __package__, str(write_case(case, folder)), str(folder)]
    launcher()


def write_case(case: Case, folder: Path) -> Path:
    """Put ``case`` where ``script.py`` reads it."""
    path = folder / f"case{os.getpid()}.pickle"
    path.write_bytes(pickle.dumps(case))
    return path


def initialize(case: Case, rank: int, ranks: int, port: int) -> Any:
    """Start Megatron without its training loop; returns its arguments."""
    set_environment(rank, ranks, port)
    sys.argv = ["oracle.py", *case.arguments()]
    install(case)
    from megatron.training.arguments import parse_and_validate_args
    from megatron.training.initialize import initialize_megatron

    args = parse_and_validate_args()
    stand_ins.install(case, args)
    initialize_megatron(allow_no_cuda=True)
    return args


def set_environment(rank: int, ranks: int, port: int) -> None:
    """What torchrun would set; and, where ranks share a GPU, what lets NCCL connect them."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    local = rank % gpus if gpus else rank
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(local), WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    if 0 < gpus < ranks:
        # It refuses two ranks of one host on a GPU, but not of two, which it connects by sockets.
        os.environ.update(NCCL_HOSTID=f"host of rank {rank}", NCCL_NET="Socket", NCCL_SOCKET_IFNAME="lo")


def install(case: Case) -> None:
    """Load the extension, or only what Megatron needs to run here."""
    if case.schedule is None:
        from megatron_2bw.mcore.cpu import backend as cpu_backend

        cpu_backend.install_as_needed()
    else:
        import megatron_2bw

        megatron_2bw.install()


def provide(kind: str, record: Any, models: list[Any], *args: Any, **kwargs: Any) -> Any:
    from .model import build_model
    from .record import weights

    model = build_model(kind, *args, **kwargs)
    models.append(model)
    record.initial = weights(model)
    return model


def forward_step(kind: str, record: Any, data_iterator: Any, model: Any) -> tuple[torch.Tensor, Any]:
    from .model import forward_step as recorded_step

    if not model.training:
        return recorded_step(kind, data_iterator, model, record.validation_losses, [])
    return recorded_step(kind, data_iterator, model, record.losses, record.seeds)


def write(record: Any, model: Any, path: Path) -> None:
    from megatron.core import parallel_state

    from .record import weights

    record.stage = parallel_state.get_pipeline_model_parallel_rank()
    record.replica = parallel_state.get_data_parallel_rank(with_context_parallel=True)
    record.tensor_rank = parallel_state.get_tensor_model_parallel_rank()
    record.final = weights(model)
    record.sleeps = faults.sleeps
    torch.save(record, path)
