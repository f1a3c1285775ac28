"""The vanilla Transformer that the paper compares with: segments are independent, positions are absolute.

Al-Rfou et al. (2018) add a learned vector for each position to the input of every layer; Vaswani et al. (2017) add
sinusoids only to the embedding. Al-Rfou et al. train on all positions of a segment. In evaluation they predict only the
last position of a window that slides by one token (`txl.evaluate_sliding`). Every prediction then has a full context,
but the whole window is recomputed for each token.

Shapes: B lanes, T tokens of a segment, H heads, D width of a head, E d_model, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int, Int64
from torch import Tensor, nn

from txl.attention.backends import causal_attention
from txl.attention.equations import sinusoid
from txl.attention.refused import AttentionRefused
from txl.config import Lengths, ModelConfig, VanillaConfig
from txl.errors import UserError
from txl.models.family import FamilyModel
from txl.models.layers import Linear, PositionwiseFeedForward, make_dropout
from txl.models.loss import AuxiliaryHeads
from txl.native.attention import why_not_training


@dataclass(frozen=True)
class NoMemory:
    """The state of a model without memory: only the number of lanes."""

    batch_size: int

    @property
    def lengths(self) -> Lengths:
        """Lengths of an empty memory, without window and clamp."""
        return Lengths()

    @property
    def length(self) -> int:
        """0: the state has no positions."""
        return 0

    def detach(self) -> NoMemory:
        """Return the state as it is."""
        return self

    def select(self, lanes: Int[Tensor, " lanes"]) -> NoMemory:
        """Return a state with as many lanes as `lanes` has indices."""
        chosen = lanes.tolist()
        if any(not -self.batch_size <= lane < self.batch_size for lane in chosen):
            raise IndexError(f"lanes are {chosen}, but the state has {self.batch_size}")
        return NoMemory(len(chosen))

    def reset(self, mask: Bool[Tensor, " B"]) -> NoMemory:
        """Return the state itself: it holds nothing to reset."""
        return self

    def filled_with_noise(self) -> NoMemory:
        """Return the state as it is."""
        return self

    def to_tensors(self) -> dict[str, Tensor]:
        """Return a tensor of zeros, one for each lane, which records the number of lanes."""
        return {"lanes": torch.zeros(self.batch_size, dtype=torch.uint8)}


class CausalSelfAttention(nn.Module):
    """Attention sub-layer: scaled dot-product attention in the segment, output projection, residual, LayerNorm."""

    def __init__(self, config: VanillaConfig):
        super().__init__()
        d_attention = config.n_head * config.d_head
        self.n_head, self.d_head = config.n_head, config.d_head
        self.pre_norm, self.dropatt = config.pre_norm, config.dropatt
        self.compiled = config.attention == "compiled"
        self.q_proj = Linear(config.d_model, d_attention, bias=False)
        self.k_proj = Linear(config.d_model, d_attention, bias=False)
        self.v_proj = Linear(config.d_model, d_attention, bias=False)
        self.o_proj = Linear(d_attention, config.d_model, bias=False)
        self.norm = nn.LayerNorm(config.d_model, eps=config.layer_norm_eps)
        self.dropout = make_dropout(config.dropout, config.locked_dropout)
        self.dropout_qkv = make_dropout(config.dropout_qkv, config.locked_dropout)

    def forward(self, hidden: Float[Tensor, "B T E"]) -> Float[Tensor, "B T E"]:
        """Compute the sub-layer for one segment."""
        context = self.norm(hidden) if self.pre_norm else hidden  # no memory: keys are those of the segment
        query, key, value = (
            self.dropout_qkv(project(context)).unflatten(-1, (self.n_head, self.d_head))
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        attended = causal_attention(query, key, value, self.dropatt if self.training else 0.0, self.compiled)
        output = self.dropout(self.o_proj(attended.flatten(-2)))
        return hidden + output if self.pre_norm else self.norm(hidden + output)


class VanillaLayer(nn.Module):
    """A layer of the vanilla Transformer: attention and feed-forward."""

    def __init__(self, config: VanillaConfig):
        super().__init__()
        self.attention = CausalSelfAttention(config)
        self.feed_forward = PositionwiseFeedForward(config)

    def forward(self, hidden: Float[Tensor, "B T E"]) -> Float[Tensor, "B T E"]:
        """Compute the layer for one segment."""
        return self.feed_forward(self.attention(hidden))


class VanillaTransformer(FamilyModel[NoMemory]):
    """The vanilla Transformer language model. It has no memory: each call of `nll` or `log_probs` reads one segment."""

    config_class = VanillaConfig
    config: VanillaConfig  # pyright: ignore[reportIncompatibleVariableOverride] (never assigned)
    attention_name = "scaled_dot_product_attention"

    @staticmethod
    def check_training(config: ModelConfig, device: str, dtype: torch.dtype) -> None:
        """Raise `AttentionRefused` if the compiled attention does not support the device, the dtype or this machine."""
        assert isinstance(config, VanillaConfig)
        if config.attention == "compiled" and (reason := why_not_training(device, dtype)):
            raise AttentionRefused("compiled", reason, "auto")

    def __init__(
        self, config: VanillaConfig, vocab_size: int, device: str | None = None, dtype: torch.dtype | None = None
    ):
        super().__init__(config, vocab_size)
        if config.attention == "compiled":
            self.attention_name = config.attention
        self.layers = nn.ModuleList(VanillaLayer(config) for _ in range(config.n_layer))
        if config.encoding == "learned":
            self.positions = nn.Parameter(torch.empty(config.n_layer, config.max_segment, config.d_model))
        if config.n_auxiliary:
            self.auxiliary = AuxiliaryHeads(config, vocab_size)
        self._finish()

    def empty_state(self, batch_size: int, lengths: Lengths) -> NoMemory:
        """Return a state for `batch_size` lanes."""
        return NoMemory(batch_size)

    def state_from_tensors(self, tensors: dict[str, Tensor]) -> NoMemory:
        """Return the state from the tensors of `NoMemory.to_tensors`."""
        return NoMemory(len(tensors["lanes"]))

    def hidden_states(self, tokens: Int64[Tensor, "B T"], state: NoMemory) -> tuple[Float[Tensor, "B T E"], NoMemory]:
        """Return h^N of one independent segment; see `LanguageModel.hidden_states`."""
        hidden = self._input(tokens, state)
        for number in range(len(self.layers)):
            hidden = self._layer(number, hidden)
        return hidden, state

    def layer_outputs(self, tokens: Int64[Tensor, "B T"], state: NoMemory) -> tuple[list[Tensor], NoMemory]:
        """Return the output of every layer if auxiliary losses need them; see `FamilyModel.layer_outputs`."""
        if self.auxiliary is None:
            return super().layer_outputs(tokens, state)
        outputs = [self._input(tokens, state)]
        for number in range(len(self.layers)):
            outputs.append(self._layer(number, outputs[-1]))
        return outputs[1:], state

    def _input(self, tokens: Tensor, state: NoMemory) -> Tensor:
        """Return h^0 [B,T,E]."""
        if not isinstance(state, NoMemory):
            raise UserError("the state belongs to another model; expected one that this model's init_state made")
        n_token = tokens.shape[1]
        if n_token > self.config.max_segment:
            raise UserError(
                f"the segment has {n_token} tokens, but this model's positions end at model.max_segment, "
                f"{self.config.max_segment}; use segments of at most that"
            )
        rows = None
        if self.config.encoding == "sinusoid":  # Vaswani et al. 2017, Sections 3.4, 3.5 and 5.4
            places = torch.arange(n_token, device=tokens.device)
            rows = sinusoid(places, self.config.d_model, self.softmax.bias.dtype)
        return self._embedded(tokens, state, rows)

    def _layer(self, number: int, hidden: Tensor) -> Tensor:
        """Return h^{n+1} from h^n for n = `number`, [B,T,E] each; learned positions are added to the input."""
        if self.config.encoding == "learned":
            hidden = hidden + self.positions[number, : hidden.shape[1]]
        return self.layers[number](hidden)
