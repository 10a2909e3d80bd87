"""The transformer to train, as far as its costs depend on it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache

from megatron_2bw.planner.errors import PlanError, check_count
from megatron_2bw.planner.multiples import nearest_divisor


class Kind(StrEnum):
    """What is trained."""

    GPT = "gpt"
    BERT = "bert"


BUSIEST = 1.1
"""Tokens of the busiest of the ranks that share experts, over the mean; with one digit, from how much memory Mixtral's
four runs with trained routers took (NVIDIA/Megatron-LM, core_v0.19.0, tests/functional_tests/test_cases/mixtral)."""


LATENT_SIZES = {"kv_lora_rank": 32, "qk_head_dim": 128, "qk_pos_emb_head_dim": 64, "v_head_dim": 128}
"""Sizes that only multi-latent attention has, and what Megatron's arguments set them to."""
_OF_EXPERTS = (
    "moe_shared_expert_intermediate_size",
    "moe_shared_expert_gate",
    "dense_layers",
    "dense_ffn_hidden_size",
)
"""Fields that only a model with experts has."""
_MAY_BE_ZERO = {"num_experts", "mtp_num_layers", "q_lora_rank", *LATENT_SIZES, *_OF_EXPERTS}


def default_ffn(hidden_size: int, *, swiglu: bool) -> int:
    """Megatron's default of ``--ffn-hidden-size``.

    >>> default_ffn(4096, swiglu=True), default_ffn(4096, swiglu=False)
    (10880, 16384)
    """
    return int((4 * hidden_size * 2 / 3) / 64) * 64 if swiglu else 4 * hidden_size


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
    """0: Megatron's, four times the hidden size, and two thirds of that where it is gated."""
    swiglu: bool = False
    """Gated: three matrices in place of two."""
    bias: bool = True
    """Of linear layers."""
    rmsnorm: bool = False
    """Norms without a bias."""
    learned_positions: bool = True
    """A weight per position, up to the sequence length."""
    rotary: bool = True
    """Positions turn queries and keys, where there is no weight per position."""
    tied: bool = True
    """Embedding and output layer share their weight."""
    dropout: bool = True
    """Of hidden states and attention, Megatron's default; its masks are kept for the backward."""
    num_experts: int = 0
    """0: no mixture of experts."""
    moe_router_topk: int = 2
    moe_shared_expert_intermediate_size: int = 0
    """Width of the experts that every token passes, together; 0: there are none."""
    moe_shared_expert_gate: bool = False
    """A weight per token for what they give."""
    dense_layers: int = 0
    """The first so many have an MLP in place of experts: ``--moe-layer-freq ([0]*N+[1]*M)``."""
    dense_ffn_hidden_size: int = 0
    """Width of that MLP; 0: as one expert."""
    multi_latent_attention: bool = False
    """Queries, keys and values come out of latent vectors; DeepSeek-AI, "DeepSeek-V2", arXiv 2405.04434, section 2.1.
    The sizes below are those of Megatron's arguments, and 0 without it."""
    q_lora_rank: int = 0
    """0: queries have no latent vector."""
    kv_lora_rank: int = 0
    """0: 32."""
    qk_head_dim: int = 0
    """Without the channels of the position; 0: 128."""
    qk_pos_emb_head_dim: int = 0
    """0: 64."""
    v_head_dim: int = 0
    """0: 128."""
    qk_layernorm: bool = False
    """Norms of each head's queries and keys, or of the latent vectors that they come from."""
    mtp_num_layers: int = 0
    """So many more tokens are predicted, by a layer each; DeepSeek-AI, "DeepSeek-V3", arXiv 2412.19437, section 2.2."""
    make_vocab_size_divisible_by: int = 128
    given_flags: str = field(default="", compare=False)
    """Megatron's flags that described it, as given; empty where something else did."""

    def __post_init__(self) -> None:
        defaults = {
            "num_query_groups": self.num_attention_heads,
            "kv_channels": self.hidden_size // max(self.num_attention_heads, 1),
            "ffn_hidden_size": default_ffn(self.hidden_size, swiglu=self.swiglu),
        }
        if self.multi_latent_attention:
            defaults |= LATENT_SIZES
        if self.dense_layers:
            defaults["dense_ffn_hidden_size"] = self.ffn_hidden_size or defaults["ffn_hidden_size"]
        for name, value in defaults.items():
            if getattr(self, name) == 0:
                object.__setattr__(self, name, value)
        if 0 < self.hidden_size < self.num_attention_heads and not self.kv_channels:
            raise PlanError(
                f"num_attention_heads {self.num_attention_heads} is more than hidden_size {self.hidden_size}: use "
                f"{self.hidden_size} or fewer, or give kv_channels"
            )
        for name, value in _unused(self).items():
            object.__setattr__(self, name, value)
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            least = 0 if f.name in _MAY_BE_ZERO else 1
            if f.type == "int":
                check_count(f.name, value, least)
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
        self._check_kinds()

    def _check_kinds(self) -> None:
        """Whether Megatron builds such layers: ``validate_args``, and ``get_gpt_decoder_layer_specs``."""
        for name in ("multi_latent_attention", "dense_layers", "mtp_num_layers"):
            if self.kind is not Kind.GPT and getattr(self, name):
                raise PlanError(f"{name} {getattr(self, name)}: Megatron has it for gpt alone, not {self.kind}")
        if self.multi_latent_attention and self.num_query_groups != self.num_attention_heads:
            raise PlanError(
                f"num_query_groups {self.num_query_groups}: multi_latent_attention has keys for each of "
                f"{self.num_attention_heads} heads; leave it out"
            )
        if self.dense_layers >= self.num_layers:
            raise PlanError(
                f"dense_layers {self.dense_layers} leave none of num_layers {self.num_layers} for experts: use fewer, "
                "or num_experts 0"
            )
        if self.mtp_num_layers and self.learned_positions:
            raise PlanError(
                f"mtp_num_layers {self.mtp_num_layers}: Megatron predicts no further tokens with learned positions; "
                "give --position-embedding-type rope"
            )

    @property
    def query_size(self) -> int:
        """Channels of all queries of one token."""
        if self.multi_latent_attention:
            return self.num_attention_heads * (self.qk_head_dim + self.qk_pos_emb_head_dim)
        return self.num_attention_heads * self.kv_channels

    @property
    def key_size(self) -> int:
        """Channels of all keys of one token."""
        return self.query_size if self.multi_latent_attention else self.num_query_groups * self.kv_channels

    @property
    def value_size(self) -> int:
        """Channels of all values of one token."""
        return self.output_size if self.multi_latent_attention else self.key_size

    @property
    def output_size(self) -> int:
        """Channels of one token between attention and its output projection."""
        return self.num_attention_heads * self.v_head_dim if self.multi_latent_attention else self.query_size

    @property
    def attention_matrices(self) -> int:
        """Weights of one layer's attention that tokens are multiplied with: a sum over its products."""
        return self.down_parameters + self._up_parameters + self.hidden_size * self.output_size

    @property
    def down_parameters(self) -> int:
        """Of those, the ones of products that give latent vectors, and the channels of keys that tell positions."""
        if not self.multi_latent_attention:
            return 0
        return self.hidden_size * (self.q_lora_rank + self.kv_lora_rank + self.qk_pos_emb_head_dim)

    @property
    def _up_parameters(self) -> int:
        """Of those, the ones of products that give queries, keys and values."""
        if not self.multi_latent_attention:
            return self.hidden_size * (self.query_size + self.key_size + self.value_size)
        of_keys = self.kv_lora_rank * (self.num_attention_heads * self.qk_head_dim + self.value_size)
        return (self.q_lora_rank or self.hidden_size) * self.query_size + of_keys

    @property
    def attention_norm_parameters(self) -> int:
        """Weights of the norms of queries and keys, which heads have in common, or of latent vectors."""
        if not self.qk_layernorm:
            return 0
        latent = (self.q_lora_rank or self.hidden_size) + self.kv_lora_rank
        return (latent if self.multi_latent_attention else 2 * self.kv_channels) * (1 if self.rmsnorm else 2)

    @property
    def attention_bias(self) -> int:
        """Numbers added to queries, keys and values; latent vectors have none."""
        return 0 if self.multi_latent_attention else self.bias * (self.query_size + 2 * self.key_size)

    @property
    def attention_parameters(self) -> int:
        """Weights of one layer's attention: query, key, value and output projections, and norms between them."""
        biases = self.attention_bias + self.bias * self.hidden_size
        return self.attention_matrices + self.attention_norm_parameters + biases

    @property
    def mlp_parameters(self) -> int:
        """Weights of one layer's MLP, or of one expert."""
        into = (1 + self.swiglu) * self.ffn_hidden_size
        return self.hidden_size * (into + self.ffn_hidden_size) + self.bias * (into + self.hidden_size)

    @property
    def shared_parameters(self) -> int:
        """Weights of one layer's shared experts, without their gate."""
        return (3 if self.swiglu else 2) * self.hidden_size * self.moe_shared_expert_intermediate_size

    @property
    def gate_parameters(self) -> int:
        """Weights of their gate."""
        return self.moe_shared_expert_gate * self.hidden_size

    @property
    def norm_parameters(self) -> int:
        """Weights of one norm."""
        return self.hidden_size * (1 if self.rmsnorm else 2)

    @property
    def layer_parameters(self) -> int:
        """Weights of one layer with experts, if the model has them: of all experts."""
        mlp = self.mlp_parameters
        if self.num_experts:
            mlp = self.num_experts * (mlp + self.hidden_size) + self.shared_parameters + self.gate_parameters
        return self.attention_parameters + mlp + 2 * self.norm_parameters

    @property
    def dense(self) -> Model:
        """A model all of whose layers are as the first ``dense_layers``; the same one if it has none."""
        return _dense(self) if self.dense_layers else self

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
        """Weights of the whole model, the tied weight once, without padding; further predicted tokens are left out."""
        positions = self.seq_length * self.hidden_size if self.learned_positions else 0
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tied else 2) + positions
        layers = (self.num_layers - self.dense_layers) * self.layer_parameters
        return layers + self.dense_layers * self.dense.layer_parameters + embeddings + self.norm_parameters


@cache
def _dense(model: Model) -> Model:
    return dataclasses.replace(model, num_experts=0, ffn_hidden_size=model.dense_ffn_hidden_size)


def _unused(model: Model) -> dict[str, int]:
    """What fields are set to that nothing looks at, so that models that are the same are equal."""
    names = [] if model.num_experts else _OF_EXPERTS
    names = [*names, *([] if model.multi_latent_attention else (*LATENT_SIZES, "q_lora_rank"))]
    names += [] if model.moe_shared_expert_intermediate_size else ["moe_shared_expert_gate"]
    names += [] if model.dense_layers else ["dense_ffn_hidden_size"]
    unused = {name: type(getattr(model, name))() for name in names}
    if model.learned_positions or model.multi_latent_attention:  # Which is rotary.
        unused["rotary"] = True
    return unused if model.num_experts else {**unused, "moe_router_topk": 2}
