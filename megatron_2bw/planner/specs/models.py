"""Models by name."""

from __future__ import annotations

from typing import Any

from megatron_2bw.planner.specs.model import Kind, Model


def _model(name: str, layers: int, hidden: int, heads: int, **more: Any) -> Model:
    return Model(name=name, num_layers=layers, hidden_size=hidden, num_attention_heads=heads, **more)


_2BW = {"seq_length": 512, "vocab_size": 50257}
"""Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training", ICML 2021; its released ``driver_sweep.py``."""
_BERT = {"kind": Kind.BERT, "seq_length": 512, "vocab_size": 30522}
_SC21 = {"seq_length": 2048, "vocab_size": 51200}
"""Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters", arXiv 2104.04473, table 1."""
_LLAMA = {
    **dict.fromkeys(("swiglu", "rmsnorm"), True),
    **dict.fromkeys(("bias", "learned_positions", "dropout", "tied"), False),
}
_LLAMA2 = _LLAMA | {"seq_length": 4096, "vocab_size": 32000}
"""Touvron et al., arXiv 2307.09288, and the published configurations."""
_LLAMA3 = _LLAMA | {"num_query_groups": 8, "seq_length": 8192, "vocab_size": 128256}
"""Grattafiori et al., arXiv 2407.21783, table 3."""
_DEEPSEEK = _LLAMA | {"multi_latent_attention": True, "kv_lora_rank": 512, "qk_layernorm": True, "seq_length": 4096}
"""Latent vectors, experts of a width of their own, one of them or more for every token, and dense first layers."""

MODELS: dict[str, Model] = {
    model.name: model
    for model in (
        _model("gpt-355m", 24, 1024, 16, **_2BW),
        _model("gpt-1.3b", 24, 2048, 16, **_2BW),
        _model("gpt-2.2b", 32, 2304, 32, **_2BW),
        _model("gpt-3.8b", 32, 3072, 32, **_2BW),
        _model("bert-355m", 24, 1024, 16, **_BERT),
        _model("bert-2.2b", 32, 2304, 32, **_BERT),
        _model("bert-3.8b", 32, 3072, 32, **_BERT),
        _model("gpt-1.7b", 24, 2304, 24, **_SC21),
        _model("gpt-3.6b", 30, 3072, 32, **_SC21),
        _model("gpt-7.5b", 36, 4096, 32, **_SC21),
        _model("gpt-18b", 40, 6144, 48, **_SC21),
        _model("gpt-39b", 48, 8192, 64, **_SC21),
        _model("gpt-76b", 60, 10240, 80, **_SC21),
        _model("gpt-145b", 80, 12288, 96, **_SC21),
        _model("gpt3-175b", 96, 12288, 96, **_SC21),
        _model("gpt-310b", 96, 16384, 128, **_SC21),
        _model("gpt-530b", 105, 20480, 128, **_SC21),
        _model("gpt-1t", 128, 25600, 160, **_SC21),
        _model("llama2-7b", 32, 4096, 32, ffn_hidden_size=11008, **_LLAMA2),
        _model("llama2-13b", 40, 5120, 40, ffn_hidden_size=13824, **_LLAMA2),
        _model("llama2-70b", 80, 8192, 64, ffn_hidden_size=28672, num_query_groups=8, **_LLAMA2),
        _model("llama3-8b", 32, 4096, 32, ffn_hidden_size=14336, **_LLAMA3),
        _model("llama3-70b", 80, 8192, 64, ffn_hidden_size=28672, **_LLAMA3),
        _model("llama3-405b", 126, 16384, 128, ffn_hidden_size=53248, **_LLAMA3),
        # Jiang et al., arXiv 2401.04088, table 1; trained here with sequences as long as Llama 2's.
        _model("mixtral-8x7b", 32, 4096, 32, ffn_hidden_size=14336, num_query_groups=8, num_experts=8, **_LLAMA2),
        # DeepSeek-AI, arXiv 2412.19437, section 4.2.
        _model(
            "deepseek-v3",
            *(61, 7168, 128),
            **_DEEPSEEK,
            dense_ffn_hidden_size=18432,
            dense_layers=3,
            q_lora_rank=1536,
            ffn_hidden_size=2048,
            moe_shared_expert_intermediate_size=2048,
            num_experts=256,
            moe_router_topk=8,
            mtp_num_layers=1,
            vocab_size=129280,
        ),
        # DeepSeek-AI, arXiv 2405.04434, appendix B, and the published configuration: queries have no latent vector.
        _model(
            "deepseek-v2-lite",
            *(27, 2048, 16),
            **_DEEPSEEK,
            dense_ffn_hidden_size=10944,
            dense_layers=1,
            ffn_hidden_size=1408,
            moe_shared_expert_intermediate_size=2816,
            num_experts=64,
            moe_router_topk=6,
            vocab_size=102400,
        ),
    )
}
"""Without the padding of the vocabulary."""
