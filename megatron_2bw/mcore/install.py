"""Puts our hooks into Megatron and takes them out again.

Not hooked: ``train_step`` and ``pretrain``, whose signatures change from release to release; the
optimizers' classes; anything in ``megatron.core`` but what is imported from it by name.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from types import TracebackType
from typing import Any

from megatron_2bw.mcore import cpu_backend
from megatron_2bw.mcore.symbols import Hook, apply, check, revert


def install() -> None:
    """Install every hook; see `megatron_2bw.install`."""
    if cpu_backend.needed():
        cpu_backend.install()
    else:
        cpu_backend.install_dataset_helpers()
    check(HOOKS)
    for hook in HOOKS:
        apply(hook)
    sys.excepthook = _end_rank


def uninstall() -> None:
    """Restore every name that `install` replaced."""
    from megatron_2bw.mcore.session import Session

    for hook in HOOKS:
        revert(hook)
    cpu_backend.uninstall()
    sys.excepthook = sys.__excepthook__
    Session.current = None


def _end_rank(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print an uncaught exception and end at once.

    Normal shutdown would wait for threads and process groups that wait for this rank.
    """
    # torch.distributed's own hook calls this one with standard error held back, to print it later.
    with contextlib.redirect_stderr(sys.__stderr__):
        sys.__excepthook__(kind, error, trace)
        print(f"megatron_2bw: rank {os.environ.get('RANK', '0')} failed with the error above", file=sys.stderr)
        sys.stderr.flush()
    sys.stdout.flush()
    os._exit(1)


def _add_arguments(original: Any, parser: Any) -> Any:
    from megatron_2bw.mcore.arguments import add_arguments

    return add_arguments(original(parser))


def _validate_arguments(original: Any, args: Any, *rest: Any, **keywords: Any) -> Any:
    from megatron_2bw.mcore.arguments import validated

    return validated(args, functools.partial(original, args, *rest, **keywords))


def _get_optimizer(original: Any, config: Any, model_chunks: Any, *rest: Any, **keywords: Any) -> Any:
    from megatron.training import get_args

    from megatron_2bw.mcore.session import Session

    inner = original(config, model_chunks, *rest, **keywords)
    name = getattr(get_args(), "pipeline_schedule", "megatron")
    if name == "megatron":
        return inner
    Session.current = Session(name)
    return Session.current.delay(inner, model_chunks)


def _get_forward_backward(original: Any, *args: Any, **keywords: Any) -> Any:
    session = _session()
    stock = original(*args, **keywords)
    return stock if session is None else functools.partial(session.forward_backward, stock)


def _locally(original: Any, value: Any, *rest: Any, **keywords: Any) -> Any:
    # Under a delay every rank already knows the outcome; asking all stages would stop the pipeline.
    session = _session()
    if session is not None and session.is_delayed:
        return value
    return original(value, *rest, **keywords)


def _settled(original: Any, *args: Any, **keywords: Any) -> Any:
    session = _session()
    if session is not None:
        session.settle()
    return original(*args, **keywords)


def _train(original: Any, *args: Any, **keywords: Any) -> Any:
    try:
        result = original(*args, **keywords)
    except SystemExit as exit_:
        if not exit_.code and _session() is not None:
            _session().close()
        raise
    if _session() is not None:
        _session().close()
    return result


def _session() -> Any:
    from megatron_2bw.mcore.session import Session

    return Session.current


_ARGUMENTS = "megatron.training.arguments"
_TRAINING = "megatron.training.training"

HOOKS: tuple[Hook, ...] = (
    Hook(
        module=_ARGUMENTS,
        name="add_megatron_arguments",
        wrapper=_add_arguments,
        parameters=("parser",),
        why="offers --pipeline-schedule",
    ),
    Hook(
        module=_ARGUMENTS,
        name="validate_args",
        wrapper=_validate_arguments,
        parameters=("args",),
        why="sets what our schedules need and refuses what they cannot do, before training",
    ),
    Hook(
        module=_TRAINING,
        name="get_megatron_optimizer",
        wrapper=_get_optimizer,
        parameters=("config", "model_chunks"),
        why="delays the update",
    ),
    Hook(
        module=_TRAINING,
        name="get_forward_backward_func",
        wrapper=_get_forward_backward,
        why="runs our schedule in place of Megatron's",
    ),
    Hook(
        module=_TRAINING,
        name="logical_and_across_model_parallel_group",
        wrapper=_locally,
        parameters=("input",),
        why="asks all stages after every batch whether the update succeeded",
    ),
    Hook(
        module=_TRAINING,
        name="reduce_max_stat_across_model_parallel_group",
        wrapper=_locally,
        parameters=("stat",),
        why="asks all stages after every batch for gradient norm and learning rate",
    ),
    Hook(
        module=_TRAINING,
        name="evaluate",
        wrapper=_settled,
        parameters=("model",),
        why="evaluation uses the newest weights",
    ),
    Hook(
        module=_TRAINING,
        name="save_checkpoint_and_time",
        wrapper=_settled,
        parameters=("model", "optimizer"),
        why="a checkpoint holds the newest weights and a finished optimizer state",
    ),
    Hook(
        module=_TRAINING,
        name="train",
        wrapper=_train,
        parameters=("model", "optimizer"),
        why="ends the run with nothing pending and nothing in flight",
    ),
)
"""Every binding that `install` replaces."""
