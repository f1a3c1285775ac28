"""Transformer-XL: language models that read past a fixed-length context.

The public names below are loaded when they are first used, so that importing the package does not import torch.
"""

from __future__ import annotations

from importlib import import_module

# Not lazy, because it shares its name with its module: whoever imports the module first would hide the function.
from txl.presets import preset, presets

TYPE_CHECKING = False  # as typing's, whose import would take longer than all of this
if TYPE_CHECKING:
    from typing import Any

    from txl.config import RunConfig
    from txl.data.corpora import open_corpus
    from txl.data.detokenise import detokenise
    from txl.decoding.engine import DecodeEngine
    from txl.decoding.sampling import Sampling
    from txl.errors import RunInterrupted, UserError
    from txl.evaluation.cache_tuning import CacheTuning, tune_cache
    from txl.evaluation.effective_context import relative_effective_context_length
    from txl.evaluation.perplexity import EvaluationResult, evaluate, evaluate_memory_lengths
    from txl.evaluation.sliding import evaluate_sliding, losses_at_context, losses_at_contexts
    from txl.evaluation.surprisal import TokenSurprisal, surprisals
    from txl.generation import generate, generate_samples, generate_tokens
    from txl.models import build_model
    from txl.models.cache import ContinuousCache
    from txl.models.language_model import LanguageModel
    from txl.models.transformer_xl import TransformerXL
    from txl.reporting.report import write_report
    from txl.run_directory import load
    from txl.training.trainer import Trainer

_HOMES = {
    "CacheTuning": "txl.evaluation.cache_tuning",
    "ContinuousCache": "txl.models.cache",
    "DecodeEngine": "txl.decoding.engine",
    "EvaluationResult": "txl.evaluation.perplexity",
    "LanguageModel": "txl.models.language_model",
    "RunConfig": "txl.config",
    "RunInterrupted": "txl.errors",
    "Sampling": "txl.decoding.sampling",
    "TokenSurprisal": "txl.evaluation.surprisal",
    "Trainer": "txl.training.trainer",
    "TransformerXL": "txl.models.transformer_xl",
    "UserError": "txl.errors",
    "build_model": "txl.models",
    "evaluate": "txl.evaluation.perplexity",
    "evaluate_memory_lengths": "txl.evaluation.perplexity",
    "evaluate_sliding": "txl.evaluation.sliding",
    "detokenise": "txl.data.detokenise",
    "generate": "txl.generation",
    "generate_samples": "txl.generation",
    "generate_tokens": "txl.generation",
    "load": "txl.run_directory",
    "losses_at_context": "txl.evaluation.sliding",
    "losses_at_contexts": "txl.evaluation.sliding",
    "open_corpus": "txl.data.corpora",
    "relative_effective_context_length": "txl.evaluation.effective_context",
    "surprisals": "txl.evaluation.surprisal",
    "tune_cache": "txl.evaluation.cache_tuning",
    "write_report": "txl.reporting.report",
}
__version__ = "0.1.0"
__all__ = [
    "CacheTuning",
    "ContinuousCache",
    "DecodeEngine",
    "EvaluationResult",
    "LanguageModel",
    "RunConfig",
    "RunInterrupted",
    "Sampling",
    "TokenSurprisal",
    "Trainer",
    "TransformerXL",
    "UserError",
    "__version__",
    "build_model",
    "evaluate",
    "evaluate_memory_lengths",
    "evaluate_sliding",
    "detokenise",
    "generate",
    "generate_samples",
    "generate_tokens",
    "load",
    "losses_at_context",
    "losses_at_contexts",
    "open_corpus",
    "relative_effective_context_length",
    "preset",
    "presets",
    "surprisals",
    "tune_cache",
    "write_report",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'txl' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
