"""What runs in place of Megatron's functions: each calls the original, and says why in `install.HOOKS`.

Our modules are imported where they are needed: importing this one must not import Megatron, which
reads the environment when it is imported.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import inspect
import traceback
from typing import Any

from megatron_2bw.mcore.loop.active import active
from megatron_2bw.schedule.registry import BIDIRECTIONAL, MEGATRON


def add_arguments(original: Any, parser: Any) -> Any:
    from megatron_2bw.mcore.loop.arguments import add_arguments

    return add_arguments(original(parser))


def parse_arguments(original: Any, *args: Any, **keywords: Any) -> Any:
    from megatron_2bw.mcore.loop.checks import parsed

    return parsed(functools.partial(original, *args, **keywords))


def validate_arguments(original: Any, args: Any, *rest: Any, **keywords: Any) -> Any:
    from megatron_2bw.mcore.loop.checks import validated

    return validated(args, functools.partial(original, args, *rest, **keywords))


def build_timers(original: Any, *args: Any, **keywords: Any) -> Any:
    from megatron_2bw.mcore.monitoring.timers import CallTimers

    return (original if _schedule() == MEGATRON else CallTimers)(*args, **keywords)


def build_model(original: Any, *args: Any, **keywords: Any) -> Any:
    from megatron_2bw.mcore.stages import mirror

    chunks = original(*args, **keywords)
    again = inspect.signature(original).bind(*args, **keywords)
    is_trained = again.arguments.get("wrap_with_ddp", True)
    if is_trained and _schedule() in BIDIRECTIONAL:
        given = again.arguments.get("pg_collection")  # None: Megatron makes one of its groups.

        def mirrored() -> Any:
            if given is not None:
                again.arguments["pg_collection"] = mirror.collection(given)
            return original(*again.args, **again.kwargs)

        (active.mirrored,) = mirror.build(mirrored)
    return chunks


def get_optimizer(original: Any, config: Any, model_chunks: Any, *rest: Any, **keywords: Any) -> Any:
    from megatron_2bw.mcore.checkpoints.checkpoint import Checkpoints
    from megatron_2bw.mcore.loop.session import Session

    mirrored = active.mirrored
    active.forget()  # A run before this one, in the same process: before Megatron looks at the weights.
    inner = original(config, model_chunks, *rest, **keywords)
    if _schedule() == MEGATRON:
        return inner
    session = Session(_schedule(), inner, model_chunks, mirrored)
    active.begin(session, Checkpoints() if session.is_delayed else None)
    return session.pipeline.optimizer


def get_scheduler(original: Any, optimizer: Any, *rest: Any, **keywords: Any) -> Any:
    scheduler = original(optimizer, *rest, **keywords)
    return scheduler if active.session is None else active.session.pipeline.drive(scheduler)


def get_forward_backward(original: Any, *args: Any, **keywords: Any) -> Any:
    session = active.session
    stock = original(*args, **keywords)
    return stock if session is None else functools.partial(session.forward_backward, stock)


def answer_locally(original: Any, value: Any, *rest: Any, **keywords: Any) -> Any:
    # Under a delay every rank already knows the outcome; asking all stages would stop the pipeline.
    session = active.session
    if session is not None and session.is_delayed:
        return value
    return original(value, *rest, **keywords)


def answer_locally_in_fp32(original: Any, stat: Any, *rest: Any, **keywords: Any) -> Any:
    value = answer_locally(original, stat, *rest, **keywords)
    # Megatron asks all stages by way of fp32, which its log shows.
    return None if value is None else ctypes.c_float(value).value


def settle_first(original: Any, *args: Any, **keywords: Any) -> Any:
    session = active.session
    with contextlib.nullcontext() if session is None else session.interrupted(original.__name__):
        return original(*args, **keywords)


def evaluate(original: Any, *args: Any, **keywords: Any) -> Any:
    session = active.session
    if session is None:
        return original(*args, **keywords)
    from megatron.training import get_timers

    from megatron_2bw.mcore.stages.random_state import RandomState

    model = inspect.signature(original).bind(*args, **keywords).arguments["model"]
    try:
        # Forwards of the next batch have run, and a checkpoint has the random state before them: a run that goes on
        # from it draws for them what was drawn, whatever an evaluation draws in between.
        with (
            session.interrupted(original.__name__),
            RandomState.present().shown() if session.is_delayed else contextlib.nullcontext(),
        ):
            result = original(*args, **keywords)
    finally:
        for chunk in model:  # Out of time, Megatron returns without this: it would exit at once.
            chunk.train()
    timer = get_timers()("evaluate", log_level=0)
    if getattr(timer, "_started", False):  # The same.
        timer.stop()
    return result


def packed_tokens(original: Any, *args: Any, **keywords: Any) -> Any:
    session = active.session
    if session is not None and session.is_delayed:
        from megatron.core import parallel_state
        from megatron.training import training

        counted = training._seqlen_stats_in_iteration
        training._seqlen_stats_active = counted is not None
        if counted is not None:  # The last stage has counted this batch; the others, which run ahead, parts of two.
            is_last = parallel_state.is_pipeline_last_stage()
            counted *= parallel_state.get_pipeline_model_parallel_world_size() if is_last else 0
    return original(*args, **keywords)


def largest_attention_logit(original: Any, *args: Any, **keywords: Any) -> float:
    session = active.session
    if session is None or session.optimizer is None:
        return original(*args, **keywords)
    return session.optimizer.largest_attention_logit  # The update has clipped.


def training_log(original: Any, *args: Any, **keywords: Any) -> Any:
    session = active.session
    if session is None:
        return original(*args, **keywords)
    call = inspect.signature(original).bind(*args, **keywords)
    losses, totals = call.arguments["loss_dict"], call.arguments["total_loss_dict"]
    if session.optimizer is not None:
        call.arguments["skipped_iter"] = skipped = session.skipped_iterations(losses)
        if skipped and not session.has_updated:  # Megatron shows no loss before the first update, where ours is in.
            for name in losses:
                totals.pop(name, None)
    if session.monitor is not None and losses:
        session.monitor.add_to(losses, totals, totals.get("advanced iterations", 0))
    return original(*call.args, **call.kwargs)


def norm_of_weights(original: Any, *args: Any, **keywords: Any) -> float | None:
    session = active.session
    if session is None or not session.is_delayed:
        return original(*args, **keywords)
    if not session.logs_this_batch():  # Megatron computes it for every batch, and all ranks take part.
        return None
    session.settle()
    return original(*args, **keywords)


def gather_signals(original: Any, item: Any, *rest: Any, **keywords: Any) -> Any:
    session = active.session
    if session is None or session.exits is None:
        return original(item, *rest, **keywords)
    return session.exits.gather("signal", item, drained=session.drained)


def decide_exit(original: Any, *args: Any, **keywords: Any) -> Any:
    from megatron.training import get_args

    session = active.session
    if session is None or session.exits is None:
        return original(*args, **keywords)
    with session.exits.duration_checked_only_at_the_end(get_args(), drained=session.drained):
        return original(*args, **keywords)


def train(original: Any, *args: Any, **keywords: Any) -> Any:
    from megatron.training import get_args

    from megatron_2bw.mcore.loop.checks import checked_before_training

    if active.session is not None:
        checked_before_training(get_args())
    try:
        result = original(*args, **keywords)
    except SystemExit as exit_:
        if not exit_.code and active.session is not None and _is_of(exit_, original):
            active.end()
        raise
    if active.session is not None:
        active.end()
    return result


def _is_of(exit_: SystemExit, loop: Any) -> bool:
    """Whether the training loop itself exits, as it does on all ranks.

    A signal's handler, a forward step or an evaluation may exit on one, in the middle of what others wait for.
    """
    *_, (frame, _) = traceback.walk_tb(exit_.__traceback__)
    return frame.f_code is inspect.unwrap(loop).__code__


def save_checkpoint(original: Any, iteration: Any, model: Any, optimizer: Any, *rest: Any, **keywords: Any) -> Any:
    if _schedule() == MEGATRON:
        return original(iteration, model, optimizer, *rest, **keywords)
    from megatron_2bw.mcore.checkpoints import folders
    from megatron_2bw.mcore.checkpoints.optimizer_state import let_state_be_saved

    if optimizer is not None:
        let_state_be_saved(optimizer)
    if _checkpoints(optimizer) is None:
        return original(iteration, model, optimizer, *rest, **keywords)
    return folders.save(original, iteration, model, optimizer, *rest, **keywords)


def load_checkpoint(original: Any, model: Any, optimizer: Any, *rest: Any, **keywords: Any) -> Any:
    if _schedule() == MEGATRON:
        return original(model, optimizer, *rest, **keywords)
    from megatron_2bw.mcore.checkpoints import folders
    from megatron_2bw.mcore.checkpoints.optimizer_state import let_state_be_loaded

    if optimizer is not None:
        let_state_be_loaded(optimizer)
    checkpoints, load = _checkpoints(optimizer), functools.partial(folders.load, original)
    if checkpoints is not None:
        load = functools.partial(checkpoints.load, load)
    return load(model, optimizer, *rest, **keywords)


def read_checkpoint(original: Any, load_dir: Any, args: Any, *rest: Any, **keywords: Any) -> Any:
    if _schedule(args) == MEGATRON:
        return original(load_dir, args, *rest, **keywords)
    from megatron_2bw.mcore.checkpoints import folders
    from megatron_2bw.mcore.checkpoints.optimizer_state import has_updates

    result = folders.read(original, load_dir, args, *rest, **keywords)
    active.loads_updates = has_updates(result[0])
    if active.checkpoints is not None:
        active.checkpoints.read(result)
    return result


def map_layers_of_gpt(original: Any, *args: Any, **keywords: Any) -> Any:
    result = original(*args, **keywords)
    if active.checkpoints is not None:
        active.checkpoints.layers_of_gpt, _ = result
    return result


def generate_state_dict(original: Any, args: Any, model: Any, optimizer: Any, *rest: Any, **keywords: Any) -> Any:
    from megatron_2bw.mcore.checkpoints.optimizer_state import without_new_state

    is_loading = (keywords.get("optim_sd_kwargs") or {}).get("is_loading", False)
    is_without_state = is_loading and optimizer is not None and not active.loads_updates
    with without_new_state(optimizer) if is_without_state else contextlib.nullcontext():
        state = original(args, model, optimizer, *rest, **keywords)
    checkpoints = _checkpoints(optimizer)
    if checkpoints is not None:
        checkpoints.add_to(state, args, model, optimizer, is_loading=is_loading, **keywords)
    return state


def get_rng_state(original: Any, *args: Any, **keywords: Any) -> Any:
    state = None if active.session is None else active.session.pipeline.random_state()
    with contextlib.nullcontext() if state is None else state.shown():
        return original(*args, **keywords)


def _schedule(args: Any = None) -> str:
    """The one that was asked for; Megatron's where none could be."""
    from megatron.training import get_args

    return getattr(get_args() if args is None else args, "pipeline_schedule", MEGATRON)


def _checkpoints(optimizer: Any) -> Any:
    """What saves and loads more than Megatron does; None for an optimizer that is not ours."""
    from megatron_2bw.mcore.updates.optimizer import DelayedOptimizer

    return active.checkpoints if isinstance(optimizer, DelayedOptimizer) else None
