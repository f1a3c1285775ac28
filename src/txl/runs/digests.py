"""Digests by which a model is recognised again, in compressed files and in snapshots of streams."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping

import torch
from torch import Tensor

from txl.data.vocabulary import Vocabulary
from txl.models.language_model import LanguageModel


def tensors_digest(tensors: Mapping[str, Tensor], more: str = "") -> str:
    """Return a digest of named tensors and of a text."""
    total = hashlib.blake2b(digest_size=16)
    for name, tensor in sorted(tensors.items()):
        total.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        total.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().data)
    total.update(more.encode())
    return total.hexdigest()


def model_digest(model: LanguageModel, vocabulary: Vocabulary) -> str:
    """Return a digest of a model's weights and configuration, and of its vocabulary."""
    described = [dataclasses.asdict(model.config), vocabulary.to_json()]
    return tensors_digest(model.state_dict(), json.dumps(described, sort_keys=True))
