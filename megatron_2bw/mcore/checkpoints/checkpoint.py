"""Checkpoints of a delayed run: Megatron's own, with the older weight versions in an entry of their own.

Megatron without this extension ignores the entry and sees the newest weights. The older versions
belong to the state of the optimizer: flags that leave that out of a checkpoint, or out of a resumed
run, leave the older versions out too.

Under 2bw all stages have one older version, and any layout can load it. PipeDream's stage s has d-1-s of
them, which only the same stages have a use for; as Megatron's torch_dist format wants every weight of the
model under a key, or none, a stage puts its oldest version where it has none that is as old.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding
from megatron.core.utils import unwrap_model
from megatron.training import get_args
from megatron.training.utils import print_rank_0

from megatron_2bw.mcore.updates.optimizer import DelayedOptimizer
from megatron_2bw.runtime.weights import WeightVersions
from megatron_2bw.schedule.registry import TWO_BW, build, canonical_name

ENTRY = "megatron_2bw"
"""Key of our entry in Megatron's state dict, and first part of our keys in a torch_dist checkpoint."""
MANIFEST = "manifest"
"""Schedule, batch and weight versions, the same on all ranks."""
OLDER = "older"
"""The state dict of the model at the version before the newest; one still older has its distance behind the name."""


class Checkpoints:
    """What one run saves beyond Megatron's state, and what it found in the checkpoint it resumed from."""

    def __init__(self) -> None:
        self.layers_of_gpt: Any = None
        """Where a GPT's checkpoint has the layers of a hybrid model, if one is being loaded into the other."""
        self._found: dict[str, Any] = {}
        """Our entry in the checkpoint that is being loaded."""

    def add_to(
        self,
        state: dict[str, Any],
        args: Any,
        model: Any,
        optimizer: DelayedOptimizer,
        *,
        is_loading: bool,
        **rest: Any,
    ) -> None:
        """Add our entry to Megatron's state dict, to be saved, or to be filled from a torch_dist checkpoint."""
        if is_loading:
            # To finetune a hybrid model, Megatron asks for a GPT's optimizer state, too.
            older = {} if args.finetune else self._to_fill(args, model, rest["model_sd_kwargs"])
            if older:
                state[ENTRY] = older
        elif not args.no_save_optim:
            manifest = _manifest(args, optimizer, rest["iteration"])
            state[ENTRY] = {MANIFEST: manifest}
            for distance in range(1, len(manifest["versions"])):
                state[ENTRY][_key(distance)] = _older(args, model, optimizer.weights, distance, rest["model_sd_kwargs"])

    def _to_fill(self, args: Any, model: Any, keywords: dict[str, Any]) -> dict[str, Any]:
        """The older versions that the checkpoint has, in memory of their own."""
        entry = {}
        for distance in _distances(args, self._found):
            # A hybrid model's weights that a GPT's checkpoint lacks keep their present values, in this version too.
            entry[_key(distance)] = _sharded(model, _key(distance), keywords, torch.clone)
            if self.layers_of_gpt is not None:
                from megatron.core.dist_checkpointing import gpt_checkpoint_interop as interop  # Since 0.19.

                interop.retarget_sharded_state_dict_to_gpt_checkpoint(entry[_key(distance)], self.layers_of_gpt)
        return entry

    def read(self, result: tuple[Any, ...]) -> None:
        """Keep our entry of what Megatron has read: first what is common to all ranks, then all of it."""
        state, _, release, _ = result
        self._found = {} if state is None or release else state.get(ENTRY, {})

    def load(self, original: Callable[..., Any], model: Any, optimizer: Any, *rest: Any, **keywords: Any) -> Any:
        """Load as Megatron does; then, where the checkpoint has them, the older versions."""
        self._found = {}
        args = get_args()
        result = original(model, optimizer, *rest, **keywords)
        if not args.finetune and not args.no_load_optim:
            if _distances(args, self._found):
                _restore(model, optimizer, self._found)
            elif result[0] > args.synchronous_warmup_iters:
                print_rank_0(
                    f"megatron_2bw: the checkpoint holds one weight version that --pipeline-schedule "
                    f"{args.pipeline_schedule} can use here, so the next batches use the same one, as at the start"
                )
        optimizer.scales.know()
        self._found = {}
        return result


def _manifest(args: Any, optimizer: DelayedOptimizer, iteration: int) -> dict[str, Any]:
    """Plain values only: Megatron reads checkpoints with ``weights_only``. The same on all ranks."""
    newest, first, scales = optimizer.weights.newest, optimizer.weights.first, optimizer.scales.by_version
    schedule = canonical_name(args.pipeline_schedule)
    stages = args.pipeline_model_parallel_size
    most = max(build(schedule, stages=stages, microbatches=1).weight_versions)
    alive = range(max(newest - most + 1, first), newest + 1)
    return {
        "schedule": schedule,
        "stages": _stages(args),
        "batch": iteration,
        "versions": [iteration - newest + version for version in alive],
        "loss_scales": [scales[version].item() for version in alive] if scales else [],
    }


def _stages(args: Any) -> list[str]:
    """What decides which weights a stage has."""
    return [
        str(getattr(args, name))
        for name in (
            "pipeline_model_parallel_size",
            "pipeline_model_parallel_layout",
            "decoder_first_pipeline_num_layers",
            "decoder_last_pipeline_num_layers",
            "account_for_embedding_in_pipeline_split",
            "account_for_loss_in_pipeline_split",
        )
    ]


def _is_of_these_stages(args: Any, manifest: dict[str, Any]) -> bool:
    """Whether each stage finds the versions that it would have had."""
    schedules = {canonical_name(args.pipeline_schedule), manifest["schedule"]}
    return schedules <= TWO_BW or (len(schedules) == 1 and manifest["stages"] == _stages(args))


def _distances(args: Any, found: dict[str, Any]) -> range:
    """Of the older versions in a checkpoint that its stages and these have in common."""
    manifest = found.get(MANIFEST)
    usable = manifest is not None and _is_of_these_stages(args, manifest)
    return range(1, len(manifest["versions"]) if usable else 1)


def _key(distance: int) -> str:
    """In the state dict, of the weights that are ``distance`` updates older than the newest."""
    return OLDER if distance == 1 else f"{OLDER}{distance}"


def _older(args: Any, model: Any, weights: WeightVersions, distance: int, keywords: dict[str, Any]) -> dict[str, Any]:
    """The state dict of the model at an older version, in the form of the checkpoint's format."""
    weights.use(weights.newest - min(distance, weights.alive - 1))
    try:
        if args.ckpt_format == "torch_dist":
            return _sharded(model, _key(distance), keywords, torch.Tensor.detach)
        return model[0].state_dict_for_save_checkpoint()
    finally:
        weights.use_newest()


def _sharded(
    model: Any, key: str, keywords: dict[str, Any], take: Callable[[torch.Tensor], torch.Tensor]
) -> dict[str, Any]:
    """The sharded state dict of ``model``, under keys of our own that begin with ``key``.

    Megatron's holds Parameters, which will show another version when the data is written: here each
    is replaced by what ``take`` makes of it now.
    """
    state = model[0].sharded_state_dict(**keywords)
    for part in nested_values(state):
        if isinstance(part, ShardedTensor | ShardedTensorFactory) and part.data is not None:
            part.data = take(part.data)
    add_prefix_for_sharding(state, f"{ENTRY}.{key}.")
    return state


def _restore(model: Any, optimizer: DelayedOptimizer, found: dict[str, Any]) -> None:
    """Make the loaded weights W(n) and those in ``found`` W(n-1) and so on, as if n batches had been done.

    n is the same on all stages: one less than the most versions of any of them. The loss scale belongs to the version.

    Raises:
        RuntimeError: a weight has no older version in the checkpoint.
    """
    weights = optimizer.weights
    (module,) = unwrap_model(model)
    missing: set[str] = set()
    for _ in found[MANIFEST]["versions"][1:]:
        with weights.update():
            pass
    for distance in range(1, weights.alive):
        weights.use(weights.newest - distance)
        missing |= set(module.load_state_dict(found[_key(distance)], strict=False).missing_keys)
    weights.use_newest()
    scales = optimizer.scales.by_version
    if scales and found[MANIFEST]["loss_scales"]:
        scales[0] = torch.full_like(scales[0], found[MANIFEST]["loss_scales"][0])
    missing &= {name for name, _ in chain(module.named_parameters(), module.named_buffers())}
    if missing:
        raise RuntimeError(f"the checkpoint has no older version of {', '.join(sorted(missing))}; load another one")
