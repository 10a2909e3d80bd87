"""Checkpoints of a 2BW run: Megatron's own, with the older weight version in an entry of their own.

Megatron without this extension ignores the entry and sees the newest weights. The older version
belongs to the state of the optimizer: flags that leave that out of a checkpoint, or out of a resumed
run, leave the older version out too.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedBase, ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding
from megatron.core.utils import unwrap_model
from megatron.training import checkpointing, get_args
from megatron.training.async_utils import maybe_finalize_async_save
from megatron.training.utils import print_rank_0

from megatron_2bw.mcore.optimizer import DelayedOptimizer
from megatron_2bw.runtime.weights import WeightVersions
from megatron_2bw.schedule.registry import canonical_name

ENTRY = "megatron_2bw"
"""Key of our entry in Megatron's state dict, and first part of our keys in a torch_dist checkpoint."""
MANIFEST = "manifest"
"""Schedule, batch and weight versions, the same on all ranks."""
OLDER = "older"
"""The state dict of the model at the version before the newest."""


class Checkpoints:
    """What one run saves beyond Megatron's state, and what it found in the checkpoint it resumed from."""

    current: Checkpoints | None = None
    """Of this process's last delayed run; saves may come after the run itself has ended."""

    def __init__(self) -> None:
        self._found: dict[str, Any] = {}
        """Our entry in the checkpoint that is being loaded."""
        self._complete: set[int] = set()
        """Iterations whose checkpoint in ``--save`` this run has written or read."""

    def add_to(self, state: dict[str, Any], args: Any, model: Any, optimizer: DelayedOptimizer, **rest: Any) -> None:
        """Add our entry to Megatron's state dict, to be saved, or to be filled from a torch_dist checkpoint."""
        if (rest.get("optim_sd_kwargs") or {}).get("is_loading"):
            if len(self._found.get(MANIFEST, {}).get("versions", ())) > 1:
                # Filled in place, so it must not share memory with the newest weights.
                state[ENTRY] = {OLDER: _sharded(model, rest["model_sd_kwargs"], torch.empty_like)}
        elif not args.no_save_optim:
            state[ENTRY] = {MANIFEST: _manifest(args, optimizer, rest["iteration"])}
            if optimizer.weights.newest > 0:
                state[ENTRY][OLDER] = _older(args, model, optimizer.weights, rest["model_sd_kwargs"])

    def read(self, result: tuple[Any, ...]) -> None:
        """Keep our entry of what Megatron has read: first what is common to all ranks, then all of it."""
        state, _, release, _ = result
        self._found = {} if state is None or release else state.get(ENTRY, {})

    def load(self, original: Callable[..., Any], model: Any, optimizer: Any, *rest: Any, **keywords: Any) -> Any:
        """Load as Megatron does; then, where the checkpoint has one, the older version."""
        self._found = {}
        result = original(model, optimizer, *rest, **keywords)
        args = get_args()
        if args.save is not None and args.load is not None and Path(args.save).resolve() == Path(args.load).resolve():
            self._complete.add(result[0])
        if not args.finetune and not args.no_load_optim:
            if OLDER in self._found:
                _restore(model, optimizer, self._found)
            elif result[0] > 0:
                print_rank_0(
                    "megatron_2bw: the checkpoint holds one weight version, so the next two batches use the same one"
                )
        newest = optimizer.weights.newest
        if optimizer.scales:
            optimizer.scales[newest] = optimizer.get_loss_scale().clone()
        self._found = {}
        return result

    def save(self, original: Callable[..., Any], iteration: int, *rest: Any, **keywords: Any) -> Any:
        """Save as Megatron does, so that an interrupted save leaves no checkpoint that would load."""
        if keywords.get("non_persistent_ckpt"):
            return original(iteration, *rest, **keywords)
        folder = get_args().save
        overwrites = [Path(checkpointing.get_checkpoint_name(folder, iteration, return_base_dir=True)).exists()]
        dist.broadcast_object_list(overwrites, src=0)
        if overwrites[0]:
            maybe_finalize_async_save(blocking=True)
            self._complete.discard(iteration)
            if dist.get_rank() == 0:
                discard_checkpoint(folder, iteration, others=self._complete)
            dist.barrier()
        result = original(iteration, *rest, **keywords)
        self._complete.add(iteration)
        return result


def discard_checkpoint(folder: str, iteration: int, *, others: Iterable[int]) -> None:
    """Remove the checkpoint of ``iteration`` before it is written anew.

    Half overwritten, it would load as a mixture of two runs. Megatron's tracker file moves on first,
    to the newest of ``others`` that is there, so it never names a checkpoint that is not complete.
    """
    old = Path(checkpointing.get_checkpoint_name(folder, iteration, return_base_dir=True))
    tracker = Path(checkpointing.get_checkpoint_tracker_filename(folder))
    if tracker.exists() and tracker.read_text().strip() == str(iteration):
        names = {other: checkpointing.get_checkpoint_name(folder, other, return_base_dir=True) for other in others}
        remaining = [other for other, name in names.items() if Path(name).exists()]
        if remaining:
            replacement = tracker.with_suffix(".new")
            replacement.write_text(str(max(remaining)))
            os.replace(replacement, tracker)
        else:
            tracker.unlink()
    if old.is_symlink():
        old.unlink()
    else:
        shutil.rmtree(old)


def _manifest(args: Any, optimizer: DelayedOptimizer, iteration: int) -> dict[str, Any]:
    """Plain values only: Megatron reads checkpoints with ``weights_only``. The same on all ranks."""
    newest = optimizer.weights.newest
    alive = [newest - 1, newest] if newest > 0 else [newest]
    return {
        "schedule": canonical_name(args.pipeline_schedule),
        "batch": iteration,
        "versions": [iteration - newest + version for version in alive],
        "loss_scales": [optimizer.scales[version].item() for version in alive] if optimizer.scales else [],
    }


def _older(args: Any, model: Any, weights: WeightVersions, keywords: dict[str, Any]) -> dict[str, Any]:
    """The state dict of the model at the older version, in the form of the checkpoint's format."""
    weights.use(weights.newest - 1)
    try:
        if args.ckpt_format == "torch_dist":
            return _sharded(model, keywords, torch.Tensor.detach)
        return model[0].state_dict_for_save_checkpoint()
    finally:
        weights.use_newest()


def _sharded(model: Any, keywords: dict[str, Any], take: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, Any]:
    """The sharded state dict of ``model``, under keys of our own.

    Megatron's holds Parameters, which will show another version when the data is written: here each
    is replaced by what ``take`` makes of it now.
    """
    state = model[0].sharded_state_dict(**keywords)
    for part in _parts(state):
        if isinstance(part, ShardedTensor | ShardedTensorFactory) and part.data is not None:
            part.data = take(part.data)
    add_prefix_for_sharding(state, f"{ENTRY}.{OLDER}.")
    return state


def _parts(state: Any) -> Iterator[ShardedBase]:
    if isinstance(state, ShardedBase):
        yield state
    elif isinstance(state, dict | list):
        for value in state.values() if isinstance(state, dict) else state:
            yield from _parts(value)


def _restore(model: Any, optimizer: DelayedOptimizer, found: dict[str, Any]) -> None:
    """Make the loaded weights W(1) and those in ``found`` W(0), as if one batch had been done.

    The loss scale belongs to the version.

    Raises:
        RuntimeError: a weight has no older version in the checkpoint.
    """
    weights = optimizer.weights
    with weights.update():
        pass
    weights.use(0)
    (module,) = unwrap_model(model)
    missing = set(module.load_state_dict(found[OLDER], strict=False).missing_keys)
    weights.use_newest()
    if optimizer.scales and found[MANIFEST]["loss_scales"]:
        optimizer.scales[0] = torch.full_like(optimizer.scales[0], found[MANIFEST]["loss_scales"][0])
    missing &= {name for name, _ in module.named_parameters()}
    if missing:
        raise RuntimeError(f"the checkpoint has no older version of {', '.join(sorted(missing))}; load another one")
