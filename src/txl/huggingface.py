"""The model for transformers 5: `import txl.huggingface`, then `AutoModelForCausalLM.from_pretrained(DIR)`.

DIR is a directory written by `txl export --format huggingface`. DIR also holds a copy of this file and of all modules
that this file imports, so that `trust_remote_code=True` opens the model where this package is not installed.

Shapes: B lanes, T tokens, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (  # pyright: ignore[reportMissingImports]
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    GenerationMixin,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_outputs import (  # pyright: ignore[reportMissingImports]
    BaseModelOutputWithPast,
    CausalLMOutputWithPast,
)

from txl.config import TransformerXLConfig as ModelFields
from txl.config.transformer_xl import HUGGINGFACE_TYPE as MODEL_TYPE
from txl.models.memory import Memory
from txl.models.transformer_xl import TransformerXL

_FIELDS = [item for item in dataclasses.fields(ModelFields) if item.init]
# Arguments from transformers that have no effect: positions are relative, and there is one type of token.
_NEEDLESS = ("position_ids", "cache_position", "token_type_ids")
_LACKING = {
    "output_attentions": "attention weights are not returned; txl attention prints them for a run",
    "inputs_embeds": "embeddings cannot be given, because an embedding and its softmax share clusters; give input_ids",
}


class TransformerXLConfig(PreTrainedConfig):
    """Fields of `txl.config.TransformerXLConfig`, under the same names, and the size of the vocabulary.

    `mem_len`, `window` and `clamp_len` are the run's test settings. `line_end_id` is the token that the model reads for
    the tokenizer's `<|endoftext|>`, whose id is `vocab_size` + 1; None: the tokenizer has no such token.
    """

    model_type = MODEL_TYPE
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012 (transformers adds a list to it)
    attribute_map = {"hidden_size": "d_model", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head"}  # noqa: RUF012

    def __init__(self, vocab_size: int = 256, line_end_id: int | None = None, **values: Any):
        self.vocab_size, self.line_end_id = vocab_size, line_end_id
        for item in _FIELDS:
            setattr(self, item.name, values.pop(item.name, item.default))  # none of the defaults is mutable
        values.setdefault("tie_word_embeddings", False)  # the model ties its weights by itself
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            values.setdefault(name, None)
        super().__init__(**values)

    def to_model_config(self) -> ModelFields:
        """Return the configuration of the wrapped model."""
        values: dict[str, Any] = {item.name: getattr(self, item.name) for item in _FIELDS}
        for name, value in values.items():
            values[name] = tuple(value) if isinstance(value, list) else value  # JSON has no tuples
        return ModelFields(**values)


class TransformerXLCache:
    """Memory and the number of tokens read so far, which transformers passes on as `past_key_values`."""

    is_compileable = False

    def __init__(self, state: Memory, n_seen: int):
        self.state, self.n_seen = state, n_seen

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of tokens read so far, including padding and tokens that memory has dropped."""
        return self.n_seen

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Select the lanes with which a beam search continues."""
        self.state = self.state.select(beam_idx)


class TransformerXLForCausalLM(PreTrainedModel, GenerationMixin):
    """Transformer-XL of `txl` with the interface of transformers."""

    config_class = TransformerXLConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = False
    _no_split_modules = ("TransformerXLLayer",)

    def __init__(self, config: TransformerXLConfig):
        super().__init__(config)
        self.model = TransformerXL(config.to_model_config(), config.vocab_size)
        self.post_init()

    def _init_weights(self, module: Any) -> None:
        """Do nothing: the wrapped model has initialised its own weights."""

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False  # `TransformerXLCache` replaces transformers' cache

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: TransformerXLCache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int = 0,
        return_dict: bool | None = None,
        num_items_in_batch: int | Tensor | None = None,
        output_hidden_states: bool | None = None,
        **needless: Any,
    ) -> CausalLMOutputWithPast | tuple[Any, ...]:
        """Read one segment.

        Args:
            input_ids: int64 [B,T].
            attention_mask: [B,S] with ones for text and zeros for padding around the text of a first segment; S is T
                plus the tokens that `past_key_values` has seen. None: zeros for the tokenizer's padding in a first
                segment, else ones.
            past_key_values: memory to continue from; None: empty memory.
            labels: int64 [B,T], not shifted: the label of a position is its own token, as everywhere in transformers.
                Labels of -100, labels of padding, and labels that padding would predict do not count.
            use_cache, return_dict, output_hidden_states: as everywhere in transformers.
            logits_to_keep: number of positions, from the end, whose logits are returned; 0, or with labels: all.
            num_items_in_batch: divisor of the summed losses, for a batch in several parts (set by transformers'
                Trainer). None: the number of labels that count.
            needless: arguments that have no effect (`_NEEDLESS`).

        Returns:
            loss (mean over the labels that count), logits [B,T',V] (log-probabilities), past_key_values, hidden_states.

        Raises:
            ValueError: for padding that cannot be read, labels that are no tokens, or arguments that ask for what the
                model lacks.
            TypeError: for unknown arguments.
        """
        hidden, layers, cache, text = self._read(
            input_ids, attention_mask, past_key_values, use_cache, output_hidden_states, needless
        )
        keep = hidden if logits_to_keep == 0 or labels is not None else hidden[:, -logits_to_keep:]
        logits = self.model.log_probs_of(keep)
        loss = None
        if labels is not None:
            if labels.shape != hidden.shape[:2]:
                raise ValueError(f"labels have shape {list(labels.shape)}; expected {list(hidden.shape[:2])}")
            targets = self._with_line_ends(labels[:, 1:])
            counts = (targets != -100) & (targets != self.config.vocab_size)
            if text is not None:  # padding predicts nothing
                first, length = text
                place = torch.arange(targets.shape[1], device=targets.device)
                counts &= (place >= first[:, None]) & (place < (first + length - 1)[:, None])
            counted, size = targets[counts], self.config.vocab_size
            if counted.numel() > 0 and (int(counted.min()) < 0 or int(counted.max()) >= size):
                found = f"labels go from {int(counted.min())} to {int(counted.max())}"
                raise ValueError(f"{found}; expected token ids, 0 to {size - 1}, padding, {size}, or -100, not counted")
            nll = -logits[:, :-1].gather(-1, targets.masked_fill(~counts, 0)[..., None]).squeeze(-1)
            loss = nll[counts].mean() if num_items_in_batch is None else nll[counts].sum() / num_items_in_batch
        output = CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=cache, hidden_states=layers)
        return output.to_tuple() if return_dict is False else output

    def get_input_embeddings(self) -> torch.nn.Module:
        """Return the embedding, int64 [B,T] -> [B,T,E]; an adaptive embedding has several tables."""
        return self.model.embedding

    def resize_token_embeddings(self, *_: Any, **__: Any) -> torch.nn.Module:
        """Raise a ValueError: embedding, clusters and softmax belong to one vocabulary."""
        raise ValueError("the vocabulary of a Transformer-XL cannot be resized; train one with the other vocabulary")

    def save_pretrained(self, save_directory: Any, **settings: Any) -> None:
        """Save the model as transformers does, and beside it the code that `trust_remote_code` loads."""
        super().save_pretrained(save_directory, **settings)
        if __name__ == "txl.huggingface":  # in the copy of an export, transformers copies the files by itself
            export = import_module("txl.interop.export_run")
            for name, source in export.flat_modules(__name__).items():
                (Path(save_directory) / name).write_text(source, encoding="utf-8")

    def _read(
        self,
        input_ids: Tensor | None,
        attention_mask: Tensor | None,
        past_key_values: TransformerXLCache | None,
        use_cache: bool | None,
        output_hidden_states: bool | None,
        needless: dict[str, Any],
    ) -> tuple[Tensor, tuple[Tensor, ...] | None, TransformerXLCache | None, tuple[Tensor, Tensor] | None]:
        """Return final hidden states, those of all layers if wanted, the cache, and `_text_in_mask`."""
        for name, value in {"output_attentions": self.config.output_attentions, **needless}.items():
            if name not in (*_NEEDLESS, *_LACKING):
                raise TypeError(f"unknown argument {name!r}")
            if name in _LACKING and value is not None and value is not False:
                raise ValueError(f"{name}: {_LACKING[name]}")
        if input_ids is None:
            raise ValueError("input_ids is missing")
        n_seen = 0 if past_key_values is None else past_key_values.n_seen
        is_padding = input_ids == self.config.vocab_size  # the tokenizer's padding
        if attention_mask is None and n_seen == 0:
            attention_mask = ~is_padding
        text = _text_in_mask(attention_mask, input_ids, n_seen)
        if n_seen == 0 and attention_mask is not None:
            has_text_after = (~is_padding).flip(1).cumsum(1).flip(1) > 0
            if bool((is_padding & attention_mask.bool() & has_text_after).any()):
                raise ValueError("input_ids has padding before text where attention_mask has ones; it cannot be read")
        state = self.model.init_state(input_ids.shape[0]) if past_key_values is None else past_key_values.state
        # Padding has the id V, which has no embedding. Any token can replace it, because no result depends on it, not
        # even if the mask has ones for it: `generate` fills lanes with padding after their text has ended.
        input_ids = self._with_line_ends(input_ids.masked_fill(is_padding, 0))
        wanted, layers = (
            self.config.output_hidden_states if output_hidden_states is None else output_hidden_states,
            None,
        )
        if text is None and not wanted:
            hidden, state = self.model.hidden_states(input_ids, state)
        else:
            layers, state = self._read_in_view(input_ids, text, state)
            hidden = layers[-1]
        cache = None if use_cache is False else TransformerXLCache(state, n_seen + input_ids.shape[1])
        return hidden, layers if wanted else None, cache, text

    def _with_line_ends(self, ids: Tensor) -> Tensor:
        """Return token ids [B,T] with the line end of the vocabulary in the place of `<|endoftext|>`."""
        line_end = self.config.line_end_id
        return ids if line_end is None else ids.masked_fill(ids == self.config.vocab_size + 1, line_end)

    def _read_in_view(
        self, input_ids: Tensor, text: tuple[Tensor, Tensor] | None, state: Memory
    ) -> tuple[tuple[Tensor, ...], Memory]:
        """Read a segment, and return the states [B,T,E] that entered each layer and that left the last, and memory.

        In a padded first segment, `text` has the first position and the length [B] of each lane's text. The text of
        every lane is moved to the left, so that causality hides the padding behind the text. Then the hidden states are
        moved back, and the states that memory keeps are moved to the right, so that the texts of all lanes end at the
        same position.
        """
        lengths, n_token = state.lengths, input_ids.shape[1]
        if text is not None:
            place = torch.arange(n_token, device=input_ids.device)
            input_ids = input_ids.gather(1, (place + text[0][:, None]).clamp(max=n_token - 1))
        room = dataclasses.replace(lengths, mem_len=state.length + n_token)
        everything = _Everything(state.hidden, state.filled, room, state.projections, torch.is_grad_enabled())
        hidden, after = self.model.hidden_states(input_ids, everything)
        layers = (*(states[:, -n_token:] for states in after.hidden), hidden)
        after = after.detach()
        memory = Memory(after.hidden, after.filled, after.lengths, after.projections)
        if text is not None:
            first, length = text
            layers = tuple(_moved_right(states, first) for states in layers)
            ends_together = tuple(_moved_right(states, n_token - length) for states in after.hidden)
            memory = Memory(ends_together, tuple(length.tolist()), after.lengths)
        return layers, memory.with_mem_len(lengths.mem_len)

    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        past_key_values: TransformerXLCache | None = None,
        attention_mask: Tensor | None = None,
        **settings: Any,
    ) -> dict[str, Any]:
        """Return inputs with only the tokens that memory has not seen: first the prompt, then one token a step."""
        n_seen = 0 if past_key_values is None else past_key_values.n_seen
        return {
            "input_ids": input_ids[:, n_seen:],
            "past_key_values": past_key_values,
            "attention_mask": attention_mask,
            "logits_to_keep": 1,
            **{name: settings.get(name) for name in ("use_cache", "output_hidden_states", "output_attentions")},
        }


class TransformerXLModel(TransformerXLForCausalLM):
    """Transformer-XL that returns hidden states instead of probabilities (`AutoModel`)."""

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: TransformerXLCache | None = None,
        use_cache: bool | None = None,
        return_dict: bool | None = None,
        output_hidden_states: bool | None = None,
        **needless: Any,
    ) -> BaseModelOutputWithPast | tuple[Any, ...]:
        """Return last_hidden_state [B,T,E], past_key_values, hidden_states; see `TransformerXLForCausalLM.forward`."""
        hidden, layers, cache, _ = self._read(
            input_ids, attention_mask, past_key_values, use_cache, output_hidden_states, needless
        )
        output = BaseModelOutputWithPast(last_hidden_state=hidden, past_key_values=cache, hidden_states=layers)
        return output.to_tuple() if return_dict is False else output


class _Everything(Memory):
    """Memory that keeps all positions of a segment, even those outside of the window."""

    @property
    def capacity(self) -> int:
        """Number of positions that fit into this memory."""
        return self.lengths.mem_len


def _moved_right(states: Tensor, distance: Tensor) -> Tensor:
    """Move each lane of states [B,T,E] right by its distance [B]; the lane's first state fills the gap on the left."""
    place = torch.arange(states.shape[1], device=states.device)
    source = (place - distance[:, None]).clamp(min=0)
    return states.gather(1, source[..., None].expand_as(states))


def _text_in_mask(mask: Tensor | None, input_ids: Tensor, n_seen: int) -> tuple[Tensor, Tensor] | None:
    """Return the first position and the length of each lane's text, int64 [B] each; None if nothing is padded."""
    if mask is None:
        return None
    n_token = input_ids.shape[1]
    if mask.ndim != 2 or mask.shape[1] not in (n_token, n_seen + n_token):
        raise ValueError(f"attention_mask has shape {list(mask.shape)}; expected [B, {n_seen + n_token}]")
    if bool(mask.all()):
        return None
    if n_seen > 0:
        if not bool(mask[:, -n_token:].all()):
            raise ValueError("attention_mask hides tokens after those that memory holds; pad the first segment instead")
        return None
    ones = mask.bool()
    first, length = ones.int().argmax(dim=1), ones.sum(dim=1)
    last = n_token - ones.flip(1).int().argmax(dim=1)
    if not bool(ones.any(dim=1).all()) or bool((length != last - first).any()):
        raise ValueError("attention_mask is empty or has gaps in a lane; expected one contiguous run of ones in each")
    return first, length


AutoConfig.register(MODEL_TYPE, TransformerXLConfig, exist_ok=True)
AutoModel.register(TransformerXLConfig, TransformerXLModel, exist_ok=True)
AutoModelForCausalLM.register(TransformerXLConfig, TransformerXLForCausalLM, exist_ok=True)
