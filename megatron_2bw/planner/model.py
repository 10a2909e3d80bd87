"""The transformer to train, as far as its costs depend on it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from enum import StrEnum

from megatron_2bw.planner.errors import MOST, PlanError, wrong_count
from megatron_2bw.planner.multiples import nearest_divisor


class Kind(StrEnum):
    """What is trained."""

    GPT = "gpt"
    BERT = "bert"


BUSIEST = 1.1
"""Tokens of the busiest of the ranks that share experts, over the mean; with one digit, from how much memory Mixtral's
four runs with trained routers took (NVIDIA/Megatron-LM, core_v0.19.0, tests/functional_tests/test_cases/mixtral)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """Sizes of a GPT or BERT; names are those of Megatron's flags.

    >>> model = Model(num_layers=24, hidden_size=1024, num_attention_heads=16, seq_length=512, vocab_size=50257)
    >>> model.ffn_hidden_size, model.kv_channels, model.num_query_groups
    (4096, 64, 16)
    >>> round(model.parameters / 1e6)
    354

    Raises:
        PlanError: a size below 1, or sizes that do not fit together.
    """

    num_layers: int
    hidden_size: int
    num_attention_heads: int
    seq_length: int
    """Tokens."""
    vocab_size: int
    """As the tokenizer counts; see ``padded_vocab_size``."""
    kind: Kind = Kind.GPT
    name: str = ""
    num_query_groups: int = 0
    """0: as many as heads."""
    kv_channels: int = 0
    """Channels per head; 0: hidden size over heads."""
    ffn_hidden_size: int = 0
    """0: four times the hidden size."""
    swiglu: bool = False
    """Gated: three matrices in place of two."""
    bias: bool = True
    """Of linear layers."""
    rmsnorm: bool = False
    """Norms without a bias."""
    learned_positions: bool = True
    """A weight per position, up to the sequence length."""
    tied: bool = True
    """Embedding and output layer share their weight."""
    dropout: bool = True
    """Of hidden states and attention, Megatron's default; its masks are kept for the backward."""
    num_experts: int = 0
    """0: no mixture of experts."""
    moe_router_topk: int = 2
    make_vocab_size_divisible_by: int = 128
    given_flags: str = field(default="", compare=False)
    """Megatron's flags that described it, as given; empty where something else did."""

    def __post_init__(self) -> None:
        defaults = {
            "num_query_groups": self.num_attention_heads,
            "kv_channels": self.hidden_size // max(self.num_attention_heads, 1),
            "ffn_hidden_size": 4 * self.hidden_size,
        }
        for name, value in defaults.items():
            if getattr(self, name) == 0:
                object.__setattr__(self, name, value)
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            least = 0 if f.name == "num_experts" else 1
            if f.type == "int" and (not isinstance(value, int) or not least <= value <= MOST):
                raise PlanError(wrong_count(f.name, value, least))
        if self.kv_channels * self.num_attention_heads != self.hidden_size and defaults["kv_channels"] == (
            self.kv_channels
        ):
            heads = nearest_divisor(self.hidden_size, self.num_attention_heads)
            raise PlanError(
                f"num_attention_heads {self.num_attention_heads} does not divide hidden_size {self.hidden_size}: "
                f"use {heads} heads, or give kv_channels"
            )
        if self.num_attention_heads % self.num_query_groups:
            groups = nearest_divisor(self.num_attention_heads, self.num_query_groups)
            raise PlanError(
                f"num_query_groups {self.num_query_groups} does not divide num_attention_heads "
                f"{self.num_attention_heads}: use {groups}"
            )
        if self.num_experts and self.moe_router_topk > self.num_experts:
            raise PlanError(
                f"moe_router_topk {self.moe_router_topk} is more than num_experts {self.num_experts}: use "
                f"{self.num_experts} or less"
            )

    @property
    def query_size(self) -> int:
        """Channels of all queries of one token."""
        return self.num_attention_heads * self.kv_channels

    @property
    def key_size(self) -> int:
        """Channels of all keys of one token, and of all values."""
        return self.num_query_groups * self.kv_channels

    @property
    def attention_parameters(self) -> int:
        """Weights of one layer's attention: query, key, value and output projections."""
        weights = self.hidden_size * (2 * self.query_size + 2 * self.key_size)
        return weights + self.bias * (self.query_size + 2 * self.key_size + self.hidden_size)

    @property
    def mlp_parameters(self) -> int:
        """Weights of one layer's MLP, or of one expert."""
        into = (1 + self.swiglu) * self.ffn_hidden_size
        return self.hidden_size * (into + self.ffn_hidden_size) + self.bias * (into + self.hidden_size)

    @property
    def norm_parameters(self) -> int:
        """Weights of one norm."""
        return self.hidden_size * (1 if self.rmsnorm else 2)

    @property
    def layer_parameters(self) -> int:
        """Weights of one layer, all experts included."""
        mlp = self.mlp_parameters
        if self.num_experts:
            mlp = self.num_experts * (mlp + self.hidden_size)
        return self.attention_parameters + mlp + 2 * self.norm_parameters

    def routed(self, expert: int) -> float:
        """Experts per token, on the busiest of ``expert`` ranks that share them; 1 without any."""
        if not self.num_experts:
            return 1
        return self.moe_router_topk * (BUSIEST if expert > 1 else 1)

    def tokens(self, microbatch: int, context: int = 1) -> int:
        """Of so many samples, on each of ``context`` ranks that share their sequences."""
        return self.seq_length * microbatch // context

    def padded_vocab_size(self, tensor_parallel: int = 1) -> int:
        """Rows of the embedding: Megatron pads them to a multiple that tensor-parallel ranks can share."""
        multiple = self.make_vocab_size_divisible_by * tensor_parallel
        return -(-self.vocab_size // multiple) * multiple

    @property
    def parameters(self) -> int:
        """Weights of the whole model, the tied weight once, without padding."""
        positions = self.seq_length * self.hidden_size if self.learned_positions else 0
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tied else 2) + positions
        return self.num_layers * self.layer_parameters + embeddings + self.norm_parameters
