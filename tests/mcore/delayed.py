"""Delayed training on one undivided model, without pipeline, DDP or Megatron's optimizer.

One process, or one per tensor- and context-parallel rank. Shares no code with ``megatron_2bw``; only the CPU backend
is loaded, as Megatron needs it to run. Sums are added up in the order of a pipelined run, so that the
two can be equal to the last bit.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from .attention import Clip
from .case import EVALUATION_ITERATIONS, MICRO_BATCH_SIZE, Case
from .fused_adam import FusedAdam, rounded
from .loss_scale import LossScale
from .record import Optimizers, RankRecord, weights
from .routers import Routers
from .shards import Shard

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """How an oracle trains, beside its case."""

    delay: int
    """0 for ordinary training, 1 for 2BW."""
    pipedream_stages: int = 0
    """Not 0: the delay is d-1-s, for every weight that of the stage it would be on."""
    evaluate_every: int = 0
    """Batches between evaluations, with one at the end; 0 for none."""
    delayed_batches: int | None = None
    """From this batch on, training is ordinary."""
    ordinary_batches: int = 0
    """Before this batch, training is ordinary; from it on, as if a delayed run began."""
    norms: tuple[tuple[float, float], ...] | None = None
    """Per batch: clip by these, the second one that of `Training.apart`; None: by its own."""
    infinite: frozenset[int] = frozenset()
    """Batches whose gradient gets an infinity."""
    directions: int = 1
    """2: gradients of even and of odd microbatches are accumulated apart, then added, as by two copies of a stage."""
    two_tied_copies: bool = False
    """Gradients of the tied weight's two uses are accumulated apart and then added, as two stages do."""


@dataclass(slots=True)
class Training:
    """Delayed training of one model.

    Batch t is computed with ``W(V)``, ``V = max(t - delay, 0)``, and
    ``W(t+1) = W(t) - lr(t) * u(grad f(W(V)))`` with u the optimizer's rule. Main weights are in fp32,
    ``W(V)`` is their copy in the precision of forward and backward. Where only the first microbatches of a batch are
    delayed, the gradients of the others are those at ``W(t)``. The loss scale is part of the version:
    that of batch t knows the overflows of the batches before V. An overflow skips the update:
    ``W(t+1) = W(t)``, and the learning rate does not move on. The biases of experts belong to the version, too; they
    move after every batch, skipped or not. So does QK-clip: by the logits of batch t, it scales ``W(t+1)``.
    """

    case: Case
    rules: Rules
    model: torch.nn.Module
    shards: list[Shard]
    main: list[torch.nn.Parameter]
    """One per parameter of the model; a second copy of the tied weight shares that of the first."""
    apart: list[bool]
    """Per main weight: whether it is clipped by a norm of such ones alone."""
    optimizers: list[torch.optim.Optimizer]
    known: Optimizers
    scheduler: Any
    loss_scale: LossScale
    tensors: dist.ProcessGroup
    """Tensor-parallel ranks."""
    sequences: dist.ProcessGroup
    """Context-parallel ranks: their losses are means over their own tokens."""
    partial_sums: list[bool]
    """Per parameter of the model: each tensor-parallel rank has the gradient of a part of the batch's work."""
    per_token: bool
    accumulated_in: torch.dtype
    """Sums of gradients over microbatches, replicas and ranks."""
    clipped_in: torch.dtype
    replicas_in_fp32: bool
    """The sum over replicas is in fp32 before it is rounded."""
    more_delay: list[int]
    """Per parameter of the model, then per bias of the routers, beside that of the rules."""
    routers: Routers
    attention: Clip
    data: Any
    record: RankRecord
    updates: int = 0
    """Done so far."""
    before: list[torch.Tensor] = field(default_factory=list)
    """Main weights before the last update."""

    def run(self, after_update: Callable[[int], None]) -> None:
        versions, scales = [[*self.compute_copy(0), *self.routers.newest]], [self.loss_scale.value]
        rules = self.rules
        for batch, span in enumerate(self.case.spans()):
            delay = rules.delay if rules.delayed_batches is None or batch < rules.delayed_batches else 0
            version = max(batch - delay, min(batch, rules.ordinary_batches))
            older = [versions[max(version - more, 0)][i] for i, more in enumerate(self.more_delay)]
            gradients = self.compute_gradient(batch, span, older, versions[batch], scales[version])
            self.before = [main.detach().clone() for main in self.main] if self.case.lead else []
            overflow = self.case.precision == "fp16" and not _everywhere_finite(gradients)
            self.loss_scale.update(overflow)
            limit = self.case.norm_limit
            if overflow or (limit and self.norm(gradients, apart=False) > limit):
                self.record.norms.append(None)
                self.record.norms_apart.append(None)
                weights_after = [weight.clone() for weight in versions[-1][: len(self.main)]]
            else:
                self.update(batch, span, gradients)
                weights_after = self.compute_copy(batch)
            self.routers.update()
            self.clip_attention(weights_after)
            versions.append([*weights_after, *self.routers.newest])
            scales.append(self.loss_scale.value)
            self.load(versions[-1])
            after_update(batch)

    def lead(self, batch: int) -> float:
        """While nothing is delayed, one step less."""
        return max(self.case.lead - 1, 0.0) if batch < self.case.synchronous else self.case.lead

    def compute_copy(self, batch: int) -> list[torch.Tensor]:
        """With a lead of updates: of weights ``y + c*(y - y_before)``."""
        mains = [main.detach() for main in self.main]
        if self.before and self.case.correction == "update-lead":
            mains = [torch.lerp(old, main, 1 + self.lead(batch)) for old, main in zip(self.before, mains, strict=True)]
        if self.case.moments and self.case.precision == "bf16":
            return list(map(rounded, mains))
        return [main.to(p.dtype, copy=True) for main, p in zip(mains, self.model.parameters(), strict=True)]

    def clip_attention(self, copy: list[torch.Tensor]) -> None:
        """Of the newest weights, the main ones and their ``copy``."""
        after = {
            p: (main.data, weight) for p, main, weight in zip(self.model.parameters(), self.main, copy, strict=True)
        }
        self.attention.update(lambda parameter: after[parameter])

    def load(self, version: list[torch.Tensor]) -> None:
        for tensor, value in zip([*self.model.parameters(), *self.routers.biases], version, strict=True):
            tensor.data.copy_(value)

    def compute_gradient(
        self, batch: int, span: range, older: list[torch.Tensor], newest: list[torch.Tensor], scale: float
    ) -> list[torch.Tensor]:
        """Of the mean over microbatches, each a mean over its tokens, then over replicas; or over all tokens.

        Accumulated over microbatches, summed over replicas, then over ranks and copies, then, in fp32, unscaled.
        """
        case, tokens = self.case, 0
        self.routers.begin_batch()
        self.attention.begin_batch()
        self.count_tokens(span, older, newest)
        sums: list[list[torch.Tensor]] = []
        for replica in range(case.replicas):
            self.routers.begin_replica()
            directions = [
                [torch.zeros_like(parameter, dtype=self.accumulated_in) for parameter in self.model.parameters()]
                for _ in range(self.rules.directions)
            ]
            for microbatch in range(len(span)):
                self.load(older if self.is_delayed(microbatch, span) else newest)
                part = directions[microbatch % len(directions)]
                if case.fused_gradients:
                    for gradient, parameter in zip(part, self.model.parameters(), strict=True):
                        parameter.main_grad = gradient
                with self.routers.show(microbatch, case.replicas):
                    tokens += self.backward(self.position(span[microbatch], replica), len(span), scale)
                for gradient, parameter in zip(part, self.model.parameters(), strict=True):
                    if parameter.grad is not None:
                        gradient += parameter.grad
                    parameter.grad = None
            part = [sum(gradients[1:], gradients[0]) for gradients in zip(*directions, strict=True)]
            if not self.per_token:
                part = [gradient / (case.replicas * case.context_parallel) for gradient in part]
            if self.replicas_in_fp32:
                part = [gradient.float() for gradient in part]
            if replica % max(case.replicas // case.instances, 1) == 0:
                sums.append(part)
            else:
                sums[-1] = [a + b for a, b in zip(sums[-1], part, strict=True)]
        total = [sum(gradients[1:], gradients[0]).to(self.accumulated_in) for gradients in zip(*sums, strict=True)]
        for gradient, is_partial in zip(total, self.partial_sums, strict=True):
            if case.context_parallel > 1:
                dist.all_reduce(gradient, group=self.sequences)
            if is_partial:
                dist.all_reduce(gradient, group=self.tensors)
        total = self.per_main_weight(total)
        if self.per_token:
            count = torch.tensor(tokens, device=total[0].device)
            dist.all_reduce(count, group=self.sequences)
            total = [gradient * (1.0 / count.clamp(min=1)) for gradient in total]
        if batch in self.rules.infinite:
            total[0].view(-1)[0] = math.inf
        return [gradient.float() * (1.0 / scale) for gradient in total]

    def is_delayed(self, microbatch: int, span: range) -> bool:
        return microbatch < (self.case.delayed or len(span))

    def position(self, microbatch: int, replica: int) -> int:
        """In the order of the samples."""
        return microbatch * self.case.replicas + replica

    def count_tokens(self, span: range, older: list[torch.Tensor], newest: list[torch.Tensor]) -> None:
        """Where a loss depends on the tokens per expert of all replicas: forwards of all, before the first backward."""
        case = self.case
        for microbatch in range(len(span) if self.routers.count_over_replicas else 0):
            self.load(older if self.is_delayed(microbatch, span) else newest)
            for replica in range(case.replicas):
                with self.routers.count(microbatch):  # Only where there would be a backward.
                    loss_of(case.kind, self.model, self.data, self.position(span[microbatch], replica))

    def backward(self, position: int, microbatches: int, scale: float) -> int:
        """Of the microbatch at ``position`` in the order of the samples; returns its number of tokens."""
        total, num_tokens = loss_of(self.case.kind, self.model, self.data, position)
        self.record.losses.append((total / num_tokens).detach())
        if not self.per_token:
            _set_scale_of_auxiliary_losses(scale / microbatches)
            objective = total / num_tokens / microbatches
        else:
            _set_scale_of_auxiliary_losses(scale)
            objective = total
        total.register_hook(self.record.seeds.append)
        (objective * scale).backward()
        return int(num_tokens)

    def per_main_weight(self, gradients: list[torch.Tensor]) -> list[torch.Tensor]:
        """Add up the gradients of copies of one weight."""
        sums: dict[torch.nn.Parameter, torch.Tensor] = {}
        for main, gradient in zip(self.main, gradients, strict=True):
            sums[main] = sums[main] + gradient if main in sums else gradient
        return list(sums.values())

    def update(self, batch: int, span: range, gradients: list[torch.Tensor]) -> None:
        norms = self.norm(gradients, apart=False), self.norm(gradients, apart=True)
        used = norms if self.rules.norms is None else self.rules.norms[batch]
        for main, gradient, apart in zip(dict.fromkeys(self.main), gradients, self.apart, strict=True):
            coefficient = self.case.clip / (used[apart] + 1.0e-6)
            if 0.0 < coefficient < 1.0:
                gradient = (gradient.to(self.clipped_in) * coefficient).float()
            if main.requires_grad:
                main.grad = gradient
        self.step(batch)
        self.scheduler.step(increment=self.case.samples(len(span)))
        self.record.norms.append(norms[False])
        self.record.norms_apart.append(norms[True] if self.case.clip else 0.0)

    def step(self, batch: int) -> None:
        """With a lead, ``m`` is ``m + k*(g - m)`` while the weights change, g scaled as m is."""
        for optimizer in self.optimizers:
            self.step_of(optimizer, lead=self.lead(batch) if self.case.correction == "lead" else 0.0)
        self.updates += 1

    def step_of(self, optimizer: torch.optim.Optimizer, lead: float) -> None:
        """Adam's m is divided by ``1 - decay**updates``, Muon's is not, SGD's is a sum."""
        name = "exp_avg" if "betas" in optimizer.param_groups[0] else "momentum_buffer"
        moments = [(main, state[name]) for main, state in optimizer.state.items()] if lead else []
        (decay,) = {group["betas"][0] if "betas" in group else group["momentum"] for group in optimizer.param_groups}
        done, share = self.updates, lead * (1 - decay) / decay

        def size(updates: int) -> float:
            if "dampening" in optimizer.param_groups[0]:
                return 1 / (1 - decay)
            return 1 - decay**updates if name == "exp_avg" else 1.0

        for main, moment in moments:
            moment.mul_(1 - share).add_(main.grad, alpha=share * size(done))
        optimizer.step()
        for main, moment in moments:
            moment.add_(main.grad, alpha=-share * size(done + 1)).div_(1 - share)

    def norm(self, gradients: list[torch.Tensor], *, apart: bool) -> float:
        """L2 of those that are apart, or of the others; weights that all tensor-parallel ranks have count once."""
        shards = dict(zip(self.main, self.shards, strict=True)).values()
        total = torch.zeros([], dtype=torch.float64, device=gradients[0].device)
        for shard, gradient, is_apart in zip(shards, gradients, self.apart, strict=True):
            if is_apart == apart and (shard.dim >= 0 or shard.tensor_rank == 0):
                total += gradient.double().square().sum()
        dist.all_reduce(total, group=self.tensors)
        return total.sqrt().item()


def _everywhere_finite(gradients: list[torch.Tensor]) -> bool:
    """Whether all gradients on all ranks are finite."""
    flag = torch.stack([gradient.isfinite().all() for gradient in gradients]).all().float()
    dist.all_reduce(flag, op=dist.ReduceOp.MIN)
    return bool(flag)


def _set_scale_of_auxiliary_losses(scale: float) -> None:
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
    from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler

    for loss in (MoEAuxLossAutoScaler, MTPLossAutoScaler):
        loss.set_loss_scale(torch.tensor([scale]).cuda())


def loss_of(kind: str, model: torch.nn.Module, data: Any, position: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum of the losses per token, and the number of tokens, of the microbatch at ``position``."""
    from .model import KINDS, on_this_rank

    indices = range(position * MICRO_BATCH_SIZE, (position + 1) * MICRO_BATCH_SIZE)
    batch = on_this_rank(torch.utils.data.default_collate([data[index] for index in indices]))
    return KINDS[kind].summed_loss(KINDS[kind].run(model, batch), batch)


def main(case: Case, rank: int, port: int, folder: Path, *, rules: Rules) -> None:
    """Train in this process and write the record, as a rank of the harness does."""
    from .worker import initialize

    args = initialize(case, rank, case.tensor_parallel * case.context_parallel, port)
    record = RankRecord(tensor_rank=rank % case.tensor_parallel, replica=rank // case.tensor_parallel)
    training = _training(case, rules, args, record)

    def after_update(batch: int) -> None:
        every = rules.evaluate_every
        if every and ((batch + 1) % every == 0 or batch + 1 == len(case.spans())):
            _evaluate(training)

    training.run(after_update)
    record.final = weights(training.model)
    if case.precision != "fp32":
        record.main = training.known.main_weights()
    torch.save(record, folder / f"rank{rank}.pt")


def _evaluate(training: Training) -> None:
    from .model import validation_samples

    record = training.record
    done = len(record.validation_losses)
    count = EVALUATION_ITERATIONS * training.case.microbatches
    data = validation_samples(training.case.kind, (done + count) * MICRO_BATCH_SIZE)
    with torch.no_grad():
        for index in range(count):
            total, num_tokens = loss_of(training.case.kind, training.model, data, done + index)
            record.validation_losses.append(total / num_tokens)


def _training(case: Case, rules: Rules, args: Any, record: RankRecord) -> Training:
    """Model, optimizers, parameter groups and schedule as Megatron configures them."""
    from megatron.core import parallel_state
    from megatron.core.optimizer import _get_param_groups
    from megatron.training.training import get_megatron_optimizer_config, get_optimizer_param_scheduler

    from .model import shards, training_samples

    model = _model(case.kind, rules, args)
    record.initial = weights(model)
    model.cuda().to(_DTYPES[case.precision])
    routers = Routers(model, args, case.replicas)
    named = {parameter: shard for shard, parameter in shards(model)}
    main_of: dict[Shard, torch.nn.Parameter] = {}
    for parameter, shard in named.items():
        is_trained = parameter.requires_grad  # Else Megatron has no main weight.
        main = parameter.detach().to(torch.float32 if is_trained else parameter.dtype, copy=True)
        main_of.setdefault(shard, torch.nn.Parameter(main, requires_grad=is_trained))
    known = Optimizers(case, record)
    known.know({shard: main_of[shard] for parameter, shard in named.items() if parameter.requires_grad}.items())
    config, overrides = get_megatron_optimizer_config(args)
    groups = _get_param_groups([model], config, overrides)
    for group in groups:
        group["params"] = list(dict.fromkeys(main_of[named[parameter]] for parameter in group["params"]))
    read_or_write = {"embedding.word_embeddings.weight", "output_layer.weight"}
    matrices = {main for shard, main in main_of.items() if len(shard.shape) == 2 and shard.name not in read_or_write}
    optimizers = _optimizers(case, config, groups, matrices)
    accumulated_in = torch.bfloat16 if args.bf16 and args.grad_reduce_in_bf16 else torch.float32
    return Training(
        case=case,
        rules=rules,
        model=model,
        shards=[named[parameter] for parameter in model.parameters()],
        main=[main_of[named[parameter]] for parameter in model.parameters()],
        apart=[shard.name.startswith("mtp.") and getattr(args, "mtp_detach_heads", False) for shard in main_of],
        optimizers=optimizers,
        known=known,
        scheduler=get_optimizer_param_scheduler(
            SimpleNamespace(param_groups=[group for optimizer in optimizers for group in optimizer.param_groups])
        ),
        loss_scale=LossScale.of(args),
        tensors=parallel_state.get_tensor_model_parallel_group(),
        sequences=parallel_state.get_context_parallel_group(),
        partial_sums=[_is_partial_sum(shard.name, parameter, args) for parameter, shard in named.items()],
        per_token=args.calculate_per_token_loss,
        accumulated_in=accumulated_in,
        clipped_in=accumulated_in if case.moments or case.offloaded else torch.float32,
        replicas_in_fp32=args.ddp_reduce_scatter_with_fp32_accumulation,
        more_delay=[
            _pipedream_delay(name, rules.pipedream_stages, args.num_layers)
            for name in [*(shard.name for shard in named.values()), *routers.names]
        ],
        routers=routers,
        attention=Clip(model, case.clip_attention, parallel_state.get_context_parallel_group()),
        data=training_samples(case.kind, case.samples(sum(case.sizes()))),
        record=record,
    )


def _optimizers(case: Case, config: Any, groups: list[Any], matrices: set[torch.nn.Parameter]) -> list[Any]:
    """AdamW, with another one for matrices; or SGD. Torch's, or those that Megatron takes where they are installed."""
    from megatron.core.optimizer import SGD, Adam

    if case.optimizer == "sgd":
        groups = [group for group in groups if group["params"]]
        return [SGD(groups, lr=config.lr, momentum=0.9, weight_decay=config.weight_decay)]
    optimizers: list[Any] = []
    if case.optimizer != "adam":
        of_matrices = [group | {"params": [p for p in group["params"] if p in matrices]} for group in groups]
        groups = [group | {"params": [p for p in group["params"] if p not in matrices]} for group in groups]
        optimizers.append(_for_matrices(case, config, [group for group in of_matrices if group["params"]]))
    if case.moments:
        moments = dict.fromkeys(("exp_avg_dtype", "exp_avg_sq_dtype"), _DTYPES[case.moments])
        Adam = functools.partial(FusedAdam, **moments)
    adam = Adam(
        [group for group in groups if group["params"]],
        lr=config.lr,
        betas=(config.adam_beta1, config.adam_beta2),
        eps=config.adam_eps,
        weight_decay=config.weight_decay,
    )
    return [*optimizers, adam]


def _for_matrices(case: Case, config: Any, groups: list[Any]) -> torch.optim.Optimizer:
    """Of the library that Megatron takes them from."""
    from emerging_optimizers.orthogonalized_optimizers import Muon
    from emerging_optimizers.scalar_optimizers import Lion
    from emerging_optimizers.soap import SOAP

    betas = config.adam_beta1, config.adam_beta2  # What Megatron 0.19 passes.
    if case.optimizer == "lion":
        return Lion(groups, lr=config.lr, betas=betas, weight_decay=config.weight_decay)
    if case.optimizer == "soap":
        return SOAP(groups, lr=config.lr, betas=betas, weight_decay=config.weight_decay, use_kl_shampoo=True)
    return Muon(
        groups,
        lr=config.lr,
        momentum=0.95,
        weight_decay=config.weight_decay,
        nesterov=True,
        extra_scale_factor=0.2,
        fp32_matmul_prec="high",
    )


def _model(kind: str, rules: Rules, args: Any) -> torch.nn.Module:
    from megatron.core.process_groups_config import ProcessGroupCollection

    from .model import build_model, load_initial

    tied = not args.untie_embeddings_and_output_weights
    if rules.two_tied_copies:
        args.untie_embeddings_and_output_weights = True
    model = build_model(kind, pg_collection=ProcessGroupCollection.use_mpu_process_groups())
    if not rules.two_tied_copies:
        return model
    model.output_layer_is_tied_copy = tied
    if args.mtp_num_layers:
        _give_own_embedding(model, tied=tied)
    load_initial(model)
    return model


def _give_own_embedding(model: Any, *, tied: bool) -> None:
    """Let multi-token prediction, and the output if tied, use a second copy of the embedding, as on the last stage."""
    own = model.embedding_of_mtp = type(model.embedding)(
        config=model.config,
        vocab_size=model.vocab_size,
        max_sequence_length=model.max_sequence_length,
        position_embedding_type=model.position_embedding_type,
        tp_group=model.pg_collection.tp,
    )
    forward = model.mtp.forward
    model.mtp.forward = lambda **keywords: forward(**keywords | {"embedding": own})
    if tied:
        model.share_embeddings_and_output_weights = True
        model.shared_embedding_or_output_weight = lambda: own.word_embeddings.weight


def _pipedream_delay(name: str, stages: int, layers: int) -> int:
    """Of a weight of a GPT with so many ``layers``, by its name."""
    if not stages:
        return 0
    parts = name.split(".")
    if parts[:2] == ["decoder", "layers"]:
        return stages - 1 - int(parts[2]) * stages // layers
    return stages - 1 if parts[0] == "embedding" else 0


def _is_partial_sum(name: str, parameter: torch.nn.Parameter, args: Any) -> bool:
    """Norms: of a part of the sequence with sequence parallelism, of a part of the heads for queries and keys.

    Experts that no ranks split: of the part of the tokens that a tensor-parallel rank has.
    """
    from .model import is_of_expert

    whole_expert = is_of_expert(name) and args.expert_tensor_parallel_size < args.tensor_model_parallel_size
    per_head = args.qk_layernorm and ("q_layernorm" in name or "k_layernorm" in name)
    return whole_expert or per_head or getattr(parameter, "sequence_parallel", False)
