"""Runs with the models and modes that Megatron's users switch on, beside the matrix."""

from __future__ import annotations

from dataclasses import replace

from .case import Case

CASE = Case(schedule="2bw", stages=2, microbatches=4, batches=12, clip=1.0, tied=False, record_gradients=True)
LLAMA = tuple(
    "--num-attention-heads 4 --group-query-attention --num-query-groups 2 --swiglu --disable-bias-linear "
    "--position-embedding-type rope --normalization RMSNorm --qk-layernorm".split()
)
GROUPED = tuple("--num-attention-heads 4 --group-query-attention --num-query-groups 2".split())
LATENT = tuple(
    "--multi-latent-attention --q-lora-rank 16 --kv-lora-rank 16 --qk-head-dim 16 --qk-pos-emb-head-dim 8 "
    "--v-head-dim 16 --rope-type rope --normalization RMSNorm".split()
)
EXPERTS = tuple(
    "--num-experts 4 --moe-router-topk 2 --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.1 "
    "--swiglu --disable-bias-linear".split()
)
BIASED = tuple(
    "--num-experts 4 --moe-router-topk 2 --moe-router-score-function sigmoid --moe-router-load-balancing-type none "
    "--moe-router-enable-expert-bias --moe-router-bias-update-rate 0.2 --swiglu --disable-bias-linear".split()
)
"""Experts without an auxiliary loss; within a dozen batches the biases change who is chosen."""
GLOBALLY_BALANCED = tuple(
    "--num-experts 4 --moe-router-topk 2 --moe-router-load-balancing-type global_aux_loss --moe-aux-loss-coeff 0.1 "
    "--swiglu --disable-bias-linear".split()
)
DETACHED = ("--mtp-detach-heads",)
"""Further tokens' layers learn alone, clipped by a norm of their own."""
SEVERAL_TOKENS = tuple("--mtp-num-layers 2 --mtp-loss-scaling-factor 0.5 --position-embedding-type rope".split())
ALL_TO_ALL = (*EXPERTS, "--moe-token-dispatcher-type", "alltoall")
EXPERTS_IN_TENSOR_PARALLEL = replace(CASE, model=EXPERTS, tensor_parallel=2, sequence_parallel=True)
SHARDED_BY_LAYERS = replace(CASE, replicas=2, optimizer="muon", distributed_optimizer=True, precision="bf16")
IN_BF16 = ("--grad-reduce-in-bf16",)
DISCARDED = ("--recompute-modules", "layernorm", "mla_up_proj")
"""Outputs that are not kept, and computed again when the backward first needs them."""
PER_TOKEN = ("--calculate-per-token-loss",)
TWO_REPLICAS = replace(CASE, replicas=2, microbatches=2)
EXACT = {
    "GQA, SwiGLU, RoPE, RMSNorm, bf16, tensor parallel": replace(
        CASE, model=LLAMA, precision="bf16", tensor_parallel=2
    ),
    "the same, sequence parallel": replace(CASE, model=LLAMA, tensor_parallel=2, sequence_parallel=True, tied=True),
    "context parallel, bf16, distributed optimizer": replace(
        CASE, context_parallel=2, precision="bf16", distributed_optimizer=True, tied=True
    ),
    "context and tensor parallel, RoPE, loss per token, fp16": replace(
        CASE, context_parallel=2, tensor_parallel=2, model=(*LLAMA, *PER_TOKEN), precision="fp16"
    ),
    "multi-latent attention": replace(CASE, model=LATENT),
    "multi-latent attention, bf16, MLP recomputed": replace(
        CASE,
        model=(*LATENT, "--disable-bias-linear"),
        precision="bf16",
        recompute="selective",
        flags=("--recompute-modules", "mlp"),
    ),
    "multi-latent attention, fp16, norms and projections discarded": replace(
        CASE, model=LATENT, precision="fp16", recompute="selective", flags=DISCARDED
    ),
    # LayerNorm: torch's RMSNorm is several operations, whose gradients are added in another order when computed apart.
    "SwiGLU, tensor and sequence parallel, norms discarded, half delayed": replace(
        CASE,
        model=("--swiglu", "--disable-bias-linear"),
        tensor_parallel=2,
        sequence_parallel=True,
        delayed=2,
        recompute="selective",
        flags=("--recompute-modules", "layernorm"),
    ),
    "loss per token, fp16": replace(TWO_REPLICAS, model=PER_TOKEN, precision="fp16", tied=True),
    "experts, fp16, distributed optimizer": replace(
        TWO_REPLICAS, model=EXPERTS, precision="fp16", distributed_optimizer=True
    ),
    "experts with biases, bf16, distributed optimizer, full recompute": replace(
        TWO_REPLICAS, model=BIASED, precision="bf16", distributed_optimizer=True, recompute="full"
    ),
    "soap, distributed optimizer, experts, half delayed": replace(
        SHARDED_BY_LAYERS, optimizer="soap", model=EXPERTS, microbatches=4, delayed=2
    ),
    "muon, distributed optimizer, lead, half delayed": replace(
        SHARDED_BY_LAYERS, microbatches=4, lead=1.0, delayed=2, tied=True
    ),
    "multi-token prediction, tied, fp16, distributed optimizer": replace(
        TWO_REPLICAS, model=SEVERAL_TOKENS, precision="fp16", distributed_optimizer=True, tied=True
    ),
    "further tokens that learn alone, tied, fp16, distributed optimizer": replace(
        TWO_REPLICAS,
        model=(*SEVERAL_TOKENS, *DETACHED),
        clip=0.3,
        precision="fp16",
        distributed_optimizer=True,
        tied=True,
    ),
    "multi-token prediction, tied, fused gradients, bf16": replace(
        CASE, model=SEVERAL_TOKENS, precision="bf16", fused_gradients=True, tied=True
    ),
    "GQA, experts, loss over the batch, multi-token prediction, full recompute": replace(
        CASE, model=(*LLAMA, *GLOBALLY_BALANCED, *SEVERAL_TOKENS), recompute="full"
    ),
    "multi-token prediction, more in flight": replace(
        CASE, stages=4, model=SEVERAL_TOKENS, microbatches=6, flags=("--pipeline-extra-in-flight", "1")
    ),
    "latent attention, experts with biases, multi-token prediction, bf16": replace(
        TWO_REPLICAS,
        model=(*LATENT, *BIASED, *SEVERAL_TOKENS),
        precision="bf16",
        distributed_optimizer=True,
    ),
    "experts with biases, half delayed": replace(CASE, model=BIASED, delayed=2),
    "experts, loss over the batch of all replicas, bf16, distributed optimizer": replace(
        TWO_REPLICAS, model=GLOBALLY_BALANCED, precision="bf16", distributed_optimizer=True
    ),
    "whole experts, tensor parallel, distributed optimizer": replace(
        EXPERTS_IN_TENSOR_PARALLEL, expert_tensor_parallel=1, distributed_optimizer=True
    ),
    "clipped attention, GQA, fp16": replace(TWO_REPLICAS, model=GROUPED, precision="fp16", clip_attention=0.2),
    "clipped latent attention, muon, distributed optimizer, tensor parallel, half delayed": replace(
        SHARDED_BY_LAYERS, microbatches=4, model=LATENT, clip_attention=0.045, tensor_parallel=2, delayed=2
    ),
    "pipeline layout": replace(
        CASE, stages=3, layers=4, flags=("--pipeline-model-parallel-layout", "Et|ttt|L"), tied=True
    ),
    "fused gradients, bf16": replace(CASE, fused_gradients=True, precision="bf16", tied=True),
    "gradients in bf16, tensor and sequence parallel": replace(
        CASE, model=IN_BF16, precision="bf16", tensor_parallel=2, sequence_parallel=True, tied=True
    ),
    "gradients in bf16, distributed optimizer, loss per token": replace(
        TWO_REPLICAS, model=(*IN_BF16, *PER_TOKEN), precision="bf16", distributed_optimizer=True, tied=True
    ),
    "gradients in bf16, summed in fp32 over four replicas": replace(
        TWO_REPLICAS,
        replicas=4,
        model=(*IN_BF16, "--ddp-reduce-scatter-with-fp32-accumulation"),
        precision="bf16",
        distributed_optimizer=True,
    ),
    "two instances of the distributed optimizer, bf16, experts": replace(
        TWO_REPLICAS, model=EXPERTS, replicas=4, instances=2, precision="bf16", distributed_optimizer=True
    ),
    "an instance of the distributed optimizer per part of the sequences, loss per token, fp16": replace(
        CASE, context_parallel=2, instances=2, model=PER_TOKEN, precision="fp16", distributed_optimizer=True, tied=True
    ),
    "precision-aware optimizer, moments in bf16, remainders of main weights": replace(
        TWO_REPLICAS, precision="bf16", distributed_optimizer=True, moments="bf16", tied=True
    ),
    "precision-aware optimizer, gradients in bf16": replace(
        TWO_REPLICAS,
        precision="bf16",
        distributed_optimizer=True,
        moments="fp32",
        model=IN_BF16,
        flags=("--main-grads-dtype", "bf16"),
    ),
    "precision-aware optimizer, fp16, one gradient buffer": replace(
        TWO_REPLICAS,
        precision="fp16",
        distributed_optimizer=True,
        moments="fp32",
        flags=("--pipeline-gradient-buffers", "1"),
    ),
    "a part of the update on the host, gradients in bf16": replace(
        TWO_REPLICAS, precision="bf16", distributed_optimizer=True, offloaded=0.5, model=IN_BF16, tied=True
    ),
    "one gradient buffer, bf16, distributed optimizer": replace(
        TWO_REPLICAS,
        precision="bf16",
        distributed_optimizer=True,
        tied=True,
        flags=("--pipeline-gradient-buffers", "1"),
    ),
    "one more in flight per boundary, at its tightest fit": replace(
        CASE,
        stages=3,
        layers=4,
        flags=("--pipeline-extra-in-flight", "1", "--pipeline-model-parallel-layout", "Et|tt|tL"),
    ),
}
"""In the test suite."""
MORE = {
    "clipped attention, context parallel, lead": replace(
        CASE, context_parallel=2, model=GROUPED, lead=1.0, clip_attention=0.2
    ),
    "clipped attention, experts, full recompute, update-lead": replace(
        CASE,
        model=(*GROUPED, *EXPERTS),
        precision="bf16",
        recompute="full",
        lead=1.0,
        correction="update-lead",
        clip_attention=0.2,
    ),
    "GQA": replace(CASE, model=("--group-query-attention", "--num-query-groups", "1")),
    "SwiGLU": replace(CASE, model=("--swiglu",)),
    "RoPE": replace(CASE, model=("--position-embedding-type", "rope")),
    "RMSNorm": replace(CASE, model=("--normalization", "RMSNorm")),
    "GQA, SwiGLU, RoPE, RMSNorm, fp16": replace(CASE, model=LLAMA, precision="fp16"),
    "multi-latent attention, bf16, full recompute": replace(CASE, model=LATENT, precision="bf16", recompute="full"),
    "sequence parallel, bf16, selective recompute": replace(
        CASE, precision="bf16", tensor_parallel=2, sequence_parallel=True, recompute="selective"
    ),
    "loss per token": replace(CASE, model=PER_TOKEN),
    "loss per token, distributed optimizer, bf16": replace(
        TWO_REPLICAS, model=PER_TOKEN, precision="bf16", distributed_optimizer=True
    ),
    "experts": replace(CASE, model=EXPERTS),
    "experts, alltoall": replace(TWO_REPLICAS, model=ALL_TO_ALL),
    "experts, loss per token": replace(TWO_REPLICAS, model=(*EXPERTS, *PER_TOKEN)),
    "experts, bf16, full recompute": replace(CASE, model=EXPERTS, precision="bf16", recompute="full"),
    "experts with biases, fp16, tensor parallel": replace(EXPERTS_IN_TENSOR_PARALLEL, model=BIASED, precision="fp16"),
    "muon, distributed optimizer, tensor and sequence parallel, update-lead": replace(
        SHARDED_BY_LAYERS, tensor_parallel=2, sequence_parallel=True, lead=1.0, correction="update-lead"
    ),
    "muon, distributed optimizer, experts, one gradient buffer": replace(
        SHARDED_BY_LAYERS, model=EXPERTS, flags=("--pipeline-gradient-buffers", "1")
    ),
    "soap, tensor parallel, tied": replace(CASE, optimizer="soap", tensor_parallel=2, tied=True),
    "soap, bf16, update-lead, full recompute": replace(
        CASE, optimizer="soap", precision="bf16", recompute="full", lead=1.0, correction="update-lead"
    ),
    "lion, distributed optimizer, PP4": replace(SHARDED_BY_LAYERS, optimizer="lion", stages=4),
    "experts with biases, recomputed": replace(
        CASE, model=BIASED, recompute="selective", flags=("--recompute-modules", "moe")
    ),
    "experts, one shared and recomputed": replace(
        CASE,
        model=(*EXPERTS, "--moe-shared-expert-intermediate-size", "32"),
        recompute="selective",
        flags=("--recompute-modules", "core_attn", "shared_experts"),
    ),
    "experts, loss over the batch": replace(CASE, model=GLOBALLY_BALANCED),
    "experts, loss over the batch, bf16, full recompute": replace(
        CASE, model=GLOBALLY_BALANCED, precision="bf16", recompute="full"
    ),
    "multi-token prediction, tensor and sequence parallel, full recompute": replace(
        CASE, model=SEVERAL_TOKENS, tensor_parallel=2, sequence_parallel=True, recompute="full"
    ),
    "multi-token prediction, bf16, loss per token": replace(
        TWO_REPLICAS, model=(*SEVERAL_TOKENS, *PER_TOKEN), precision="bf16"
    ),
    "further tokens that learn alone, experts, tensor and sequence parallel": replace(
        EXPERTS_IN_TENSOR_PARALLEL, model=(*EXPERTS, *SEVERAL_TOKENS, *DETACHED), clip=0.3
    ),
    "further tokens that learn alone, muon, distributed optimizer, full recompute": replace(
        SHARDED_BY_LAYERS, model=(*SEVERAL_TOKENS, *DETACHED), clip=0.3, recompute="full"
    ),
    "experts, tensor parallel": EXPERTS_IN_TENSOR_PARALLEL,
    "whole experts, tensor parallel, bf16": replace(
        EXPERTS_IN_TENSOR_PARALLEL, expert_tensor_parallel=1, precision="bf16"
    ),
    "uneven stages": replace(
        CASE,
        layers=4,
        flags=tuple("--decoder-first-pipeline-num-layers 1 --decoder-last-pipeline-num-layers 3".split()),
    ),
    "fused gradients": replace(CASE, fused_gradients=True),
    "fused gradients, distributed optimizer": replace(TWO_REPLICAS, fused_gradients=True, distributed_optimizer=True),
    "fused gradients, fp16, tensor parallel": replace(CASE, fused_gradients=True, precision="fp16", tensor_parallel=2),
    "gradients in bf16": replace(CASE, model=IN_BF16, precision="bf16"),
    "gradients in bf16, fused, one gradient buffer": replace(
        CASE, model=IN_BF16, precision="bf16", fused_gradients=True, flags=("--pipeline-gradient-buffers", "1")
    ),
    "gradients in bf16, experts, distributed optimizer, one gradient buffer": replace(
        TWO_REPLICAS,
        model=(*IN_BF16, *BIASED),
        precision="bf16",
        distributed_optimizer=True,
        flags=("--pipeline-gradient-buffers", "1"),
    ),
    "gradients in bf16, muon, distributed optimizer": replace(SHARDED_BY_LAYERS, model=IN_BF16),
    "one gradient buffer": replace(CASE, flags=("--pipeline-gradient-buffers", "1")),
    "one gradient buffer, fp16, tensor parallel": replace(
        CASE, precision="fp16", tensor_parallel=2, flags=("--pipeline-gradient-buffers", "1")
    ),
    "one more in flight per boundary, fp16, distributed optimizer, one gradient buffer": replace(
        TWO_REPLICAS,
        precision="fp16",
        distributed_optimizer=True,
        flags=("--pipeline-extra-in-flight", "1", "--pipeline-gradient-buffers", "1"),
    ),
    "BERT, bf16, distributed optimizer": replace(
        TWO_REPLICAS, kind="bert", precision="bf16", distributed_optimizer=True, tied=True
    ),
    "BERT, fp16, tensor parallel, full recompute": replace(
        CASE, kind="bert", precision="fp16", tensor_parallel=2, recompute="full"
    ),
    "overlap flags, bf16, distributed optimizer": replace(
        TWO_REPLICAS,
        precision="bf16",
        distributed_optimizer=True,
        flags=("--overlap-grad-reduce", "--overlap-param-gather"),
    ),
}
"""These take minutes; `scripts/oracle_matrix.py` runs them."""
