"""Models by name."""

from __future__ import annotations

from megatron_2bw.planner.specs.model import Kind, Model


def _gpt(name: str, layers: int, hidden: int, heads: int, *, length: int, vocabulary: int) -> Model:
    return Model(
        name=name,
        num_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        seq_length=length,
        vocab_size=vocabulary,
    )


def _bert(name: str, layers: int, hidden: int, heads: int) -> Model:
    return Model(
        kind=Kind.BERT,
        name=name,
        num_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        seq_length=512,
        vocab_size=30522,
    )


def _llama(
    name: str,
    layers: int,
    hidden: int,
    heads: int,
    ffn: int,
    *,
    groups: int,
    length: int,
    vocabulary: int,
    experts: int = 0,
) -> Model:
    return Model(
        name=name,
        num_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        num_query_groups=groups,
        ffn_hidden_size=ffn,
        seq_length=length,
        vocab_size=vocabulary,
        num_experts=experts,
        swiglu=True,
        bias=False,
        rmsnorm=True,
        learned_positions=False,
        dropout=False,
        tied=False,
    )


def _deepseek(name: str, layers: int, hidden: int, heads: int, ffn: int, **sizes: int) -> Model:
    """Latent vectors, experts of a width of their own, one of them or more for every token, and dense first layers."""
    return Model(
        name=name,
        num_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        dense_ffn_hidden_size=ffn,
        multi_latent_attention=True,
        kv_lora_rank=512,
        qk_layernorm=True,
        swiglu=True,
        bias=False,
        rmsnorm=True,
        learned_positions=False,
        dropout=False,
        tied=False,
        **sizes,
    )


_2BW = {"length": 512, "vocabulary": 50257}
"""Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training", ICML 2021; its released ``driver_sweep.py``."""
_SC21 = {"length": 2048, "vocabulary": 51200}
"""Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters", arXiv 2104.04473, table 1."""
_LLAMA2 = {"length": 4096, "vocabulary": 32000}
"""Touvron et al., arXiv 2307.09288, and the published configurations."""
_LLAMA3 = {"length": 8192, "vocabulary": 128256}
"""Grattafiori et al., arXiv 2407.21783, table 3."""

MODELS: dict[str, Model] = {
    model.name: model
    for model in (
        _gpt("gpt-355m", 24, 1024, 16, **_2BW),
        _gpt("gpt-1.3b", 24, 2048, 16, **_2BW),
        _gpt("gpt-2.2b", 32, 2304, 32, **_2BW),
        _gpt("gpt-3.8b", 32, 3072, 32, **_2BW),
        _bert("bert-355m", 24, 1024, 16),
        _bert("bert-2.2b", 32, 2304, 32),
        _bert("bert-3.8b", 32, 3072, 32),
        _gpt("gpt-1.7b", 24, 2304, 24, **_SC21),
        _gpt("gpt-3.6b", 30, 3072, 32, **_SC21),
        _gpt("gpt-7.5b", 36, 4096, 32, **_SC21),
        _gpt("gpt-18b", 40, 6144, 48, **_SC21),
        _gpt("gpt-39b", 48, 8192, 64, **_SC21),
        _gpt("gpt-76b", 60, 10240, 80, **_SC21),
        _gpt("gpt-145b", 80, 12288, 96, **_SC21),
        _gpt("gpt3-175b", 96, 12288, 96, **_SC21),
        _gpt("gpt-310b", 96, 16384, 128, **_SC21),
        _gpt("gpt-530b", 105, 20480, 128, **_SC21),
        _gpt("gpt-1t", 128, 25600, 160, **_SC21),
        _llama("llama2-7b", 32, 4096, 32, 11008, groups=32, **_LLAMA2),
        _llama("llama2-13b", 40, 5120, 40, 13824, groups=40, **_LLAMA2),
        _llama("llama2-70b", 80, 8192, 64, 28672, groups=8, **_LLAMA2),
        _llama("llama3-8b", 32, 4096, 32, 14336, groups=8, **_LLAMA3),
        _llama("llama3-70b", 80, 8192, 64, 28672, groups=8, **_LLAMA3),
        _llama("llama3-405b", 126, 16384, 128, 53248, groups=8, **_LLAMA3),
        # Jiang et al., arXiv 2401.04088, table 1; trained here with sequences as long as Llama 2's.
        _llama("mixtral-8x7b", 32, 4096, 32, 14336, groups=8, experts=8, **_LLAMA2),
        # DeepSeek-AI, arXiv 2412.19437, section 4.2.
        _deepseek(
            "deepseek-v3",
            *(61, 7168, 128, 18432),
            dense_layers=3,
            q_lora_rank=1536,
            ffn_hidden_size=2048,
            moe_shared_expert_intermediate_size=2048,
            num_experts=256,
            moe_router_topk=8,
            mtp_num_layers=1,
            seq_length=4096,
            vocab_size=129280,
        ),
        # DeepSeek-AI, arXiv 2405.04434, appendix B, and the published configuration: queries have no latent vector.
        _deepseek(
            "deepseek-v2-lite",
            *(27, 2048, 16, 10944),
            dense_layers=1,
            ffn_hidden_size=1408,
            moe_shared_expert_intermediate_size=2816,
            num_experts=64,
            moe_router_topk=6,
            seq_length=4096,
            vocab_size=102400,
        ),
    )
}
"""Without the padding of the vocabulary."""
