"""Puts our hooks into Megatron and takes them out again.

Not hooked: ``train_step`` and ``pretrain``, whose signatures change from release to release; the
optimizers' classes; anything in ``megatron.core`` but what is imported from it by name. What Megatron needs without a
GPU, or without Apex and Transformer Engine, is in `cpu.backend`.
"""

from __future__ import annotations

from megatron_2bw.mcore.cpu import backend as cpu_backend
from megatron_2bw.mcore.loop import wrappers
from megatron_2bw.mcore.loop.active import active
from megatron_2bw.mcore.symbols import Hook, apply, check, is_relied_on, revert
from megatron_2bw.mcore.used import USED
from megatron_2bw.runtime.gloo_workers import finish_at_exit


def install() -> None:
    """Install every hook; see `megatron_2bw.install`."""
    try:
        cpu_backend.install_as_needed()  # Before Megatron is imported, which the check does.
        check(HOOKS + USED)
    except BaseException:
        cpu_backend.uninstall()
        raise
    for hook in filter(is_relied_on, HOOKS):
        apply(hook)
    finish_at_exit()


def uninstall() -> None:
    """Restore every name that `install` replaced; threads of gloo that it guards at exit may be there still."""
    for hook in filter(is_relied_on, HOOKS):
        revert(hook)
    cpu_backend.uninstall()
    active.forget()


_ARGUMENTS = "megatron.training.arguments"
_TRAINING = "megatron.training.training"
_CHECKPOINTING = "megatron.training.checkpointing"

HOOKS: tuple[Hook, ...] = (
    Hook(
        module=_ARGUMENTS,
        name="add_megatron_arguments",
        wrapper=wrappers.add_arguments,
        parameters=("parser",),
        why="offers --pipeline-schedule",
    ),
    Hook(
        module=_ARGUMENTS,
        name="parse_args",
        wrapper=wrappers.parse_arguments,
        why="a YAML file would replace our arguments together with Megatron's",
    ),
    Hook(
        module=_ARGUMENTS,
        name="validate_args",
        wrapper=wrappers.validate_arguments,
        parameters=("args",),
        why="sets what our schedules need and refuses what they cannot do, before training",
    ),
    Hook(
        module="megatron.training.global_vars",
        name="Timers",
        wrapper=wrappers.build_timers,
        parameters=("log_level", "log_option"),
        why="timers inside a call must not wait for the whole device",
    ),
    Hook(
        module=_TRAINING,
        name="get_model",
        wrapper=wrappers.build_model,
        parameters=("pg_collection",),
        why="a rank of a bidirectional pipeline has a second stage",
    ),
    *(
        Hook(
            module=f"megatron.training.models.{kind}",
            name="unimodal_build_distributed_models",
            wrapper=wrappers.build_model,
            parameters=("pg_collection",),
            since=(0, 19),
            why="scripts that describe their model by a ModelConfig build it there",
        )
        for kind in ("gpt", "hybrid")
    ),
    Hook(
        module=_TRAINING,
        name="get_megatron_optimizer",
        wrapper=wrappers.get_optimizer,
        parameters=("config", "model_chunks"),
        why="delays the update",
    ),
    Hook(
        module=_TRAINING,
        name="get_optimizer_param_scheduler",
        wrapper=wrappers.get_scheduler,
        parameters=("optimizer",),
        why="the learning rate moves on when an update is known to be successful",
    ),
    Hook(
        module=_TRAINING,
        name="get_forward_backward_func",
        wrapper=wrappers.get_forward_backward,
        why="runs our schedule in place of Megatron's",
    ),
    Hook(
        module=_TRAINING,
        name="logical_and_across_model_parallel_group",
        wrapper=wrappers.answer_locally,
        parameters=("input",),
        why="asks all stages after every batch whether the update succeeded",
    ),
    Hook(
        module=_TRAINING,
        name="reduce_max_stat_across_model_parallel_group",
        wrapper=wrappers.answer_locally_in_fp32,
        parameters=("stat",),
        why="asks all stages after every batch for gradient norm and learning rate",
    ),
    Hook(
        module=_TRAINING,
        name="clip_qk",
        wrapper=wrappers.largest_attention_logit,
        parameters=("model",),
        why="it would clip weights by what forwards of two batches recorded, and meet the replicas for it",
    ),
    Hook(
        module=_TRAINING,
        name="training_log",
        wrapper=wrappers.training_log,
        parameters=("skipped_iter",),
        why="counts one skipped update at most, and a drained call may end two",
    ),
    Hook(
        module=_TRAINING,
        name="evaluate",
        wrapper=wrappers.evaluate,
        parameters=("model",),
        why="evaluation uses the newest weights, and one that is cut short may be followed by another batch",
    ),
    Hook(
        module=_TRAINING,
        name="consume_seqlen_stats_in_iteration",
        wrapper=wrappers.packed_tokens,
        why="all ranks meet if one of them has run a forward in this call, and in a drained one some have not",
    ),
    Hook(
        module=_TRAINING,
        name="save_checkpoint_and_time",
        wrapper=wrappers.settle_first,
        parameters=("model", "optimizer"),
        why="a checkpoint holds the newest weights and a finished optimizer state",
    ),
    Hook(
        module=_TRAINING,
        name="save_checkpoint",
        wrapper=wrappers.save_checkpoint,
        parameters=("iteration", "model", "optimizer", "non_persistent_ckpt"),
        why="half overwritten by an interrupted save, a checkpoint would load as a mixture",
    ),
    Hook(
        module=_TRAINING,
        name="load_checkpoint",
        wrapper=wrappers.load_checkpoint,
        parameters=("ddp_model", "optimizer"),
        why="a resumed run goes on with both weight versions",
    ),
    Hook(
        module=_CHECKPOINTING,
        name="_load_base_checkpoint",
        wrapper=wrappers.read_checkpoint,
        parameters=("load_dir", "args"),
        why="finds the older weight version in what Megatron reads",
    ),
    Hook(
        module=_CHECKPOINTING,
        name="_maybe_setup_gpt_to_hybrid_load",
        wrapper=wrappers.map_layers_of_gpt,
        since=(0, 19),
        why="the older weights of a GPT that a hybrid model loads are under the GPT's keys, too",
    ),
    Hook(
        module=_CHECKPOINTING,
        name="generate_state_dict",
        wrapper=wrappers.generate_state_dict,
        parameters=("args", "model", "optimizer", "iteration", "optim_sd_kwargs", "model_sd_kwargs"),
        why="a checkpoint carries the older weight version",
    ),
    Hook(
        module=_CHECKPOINTING,
        name="get_rng_state",
        wrapper=wrappers.get_rng_state,
        why="a checkpoint carries the random state before forwards that ran ahead",
    ),
    Hook(
        module=_TRAINING,
        name="calc_params_l2_norm",
        wrapper=wrappers.norm_of_weights,
        parameters=("model",),
        why="the norm that is logged is that of the newest weights, and is computed only where it is logged",
    ),
    Hook(
        module=_TRAINING,
        name="check_param_hashes_across_dp_replicas",
        wrapper=wrappers.settle_first,
        parameters=("model",),
        why="compares the newest weights of the replicas",
    ),
    Hook(
        module="megatron.training.dist_signal_handler",
        name="all_gather_item",
        wrapper=wrappers.gather_signals,
        parameters=("item",),
        why="asks all ranks after every batch whether one received a signal",
    ),
    Hook(
        module=_TRAINING,
        name="checkpoint_and_decide_exit",
        wrapper=wrappers.decide_exit,
        why="asks all ranks after every batch whether the time is up",
    ),
    Hook(
        module=_TRAINING,
        name="train",
        wrapper=wrappers.train,
        parameters=("model", "optimizer"),
        why="ends the run with nothing pending and nothing in flight",
    ),
)
"""Every binding that our schedules need."""
