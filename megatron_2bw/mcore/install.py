"""Puts our hooks into Megatron and takes them out again.

Not hooked: ``train_step`` and ``pretrain``, whose signatures change from release to release; the
optimizers' classes; anything in ``megatron.core`` but what is imported from it by name.
"""

from __future__ import annotations

import functools
from typing import Any

from megatron_2bw.mcore import cpu_backend
from megatron_2bw.mcore.symbols import Hook, Used, apply, check, revert


def install() -> None:
    """Install every hook; see `megatron_2bw.install`."""
    if cpu_backend.needed():
        cpu_backend.install()
    else:
        cpu_backend.install_dataset_helpers()
    check(HOOKS + USED)
    for hook in HOOKS:
        apply(hook)


def uninstall() -> None:
    """Restore every name that `install` replaced."""
    from megatron_2bw.mcore.session import Session

    for hook in HOOKS:
        revert(hook)
    cpu_backend.uninstall()
    Session.end_current()


def _add_arguments(original: Any, parser: Any) -> Any:
    from megatron_2bw.mcore.arguments import add_arguments

    return add_arguments(original(parser))


def _parse_arguments(original: Any, *args: Any, **keywords: Any) -> Any:
    from megatron_2bw.mcore.arguments import parsed

    return parsed(functools.partial(original, *args, **keywords))


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
_SCHEDULES = "megatron.core.pipeline_parallel.schedules"

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
        name="parse_args",
        wrapper=_parse_arguments,
        why="a YAML file would replace our arguments together with Megatron's",
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

_OPTIMIZER = "megatron.core.optimizer"

USED: tuple[Used, ...] = (
    Used(module=_SCHEDULES, name="forward_step", parameters=("current_microbatch", "is_last_stage", "cp_group_size")),
    Used(module=_SCHEDULES, name="backward_step", parameters=("input_tensor", "output_tensor", "output_tensor_grad")),
    Used(module=_SCHEDULES, name="get_tensor_shapes", parameters=("tp_group", "cp_group", "decoder_seq_length")),
    Used(module=_SCHEDULES, name="deallocate_output_tensor", parameters=("out", "deallocate_pipeline_outputs")),
    Used(module=f"{_OPTIMIZER}.clip_grads", name="multi_tensor_applier"),
    Used(module=f"{_OPTIMIZER}.clip_grads", name="l2_norm_impl"),
    Used(module=f"{_OPTIMIZER}.optimizer", name="SEPARATE_GRAD_NORM_GROUPS"),
    Used(module=f"{_OPTIMIZER}.optimizer", name="ChainedOptimizer.get_grad_norm"),
    Used(
        module=f"{_OPTIMIZER}.optimizer", name="ChainedOptimizer.has_grad_norm_group", parameters=("grad_norm_group",)
    ),
    Used(module=f"{_OPTIMIZER}.optimizer", name="MegatronOptimizer.get_grads_for_grad_norm"),
    Used(module=f"{_OPTIMIZER}.optimizer", name="MegatronOptimizer.prepare_grads"),
    Used(module="megatron.core.timers", name="Timer.set_barrier_group", parameters=("barrier_group",)),
    Used(module="megatron.core.distributed", name="finalize_model_grads"),
)
"""Every symbol of Megatron that `install` leaves alone and a run relies on."""
