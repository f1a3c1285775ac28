# The public names of txl, each with its home. `__init__.py` loads a name from here when it is first used.

from .config import RunConfig as RunConfig
from .data.corpora import open_corpus as open_corpus
from .data.detokenise import detokenise as detokenise
from .errors import RunInterrupted as RunInterrupted
from .errors import UserError as UserError
from .evaluation.dynamic import Adaptation as Adaptation
from .evaluation.dynamic import AdaptingModel as AdaptingModel
from .evaluation.dynamic import GradientStatistics as GradientStatistics
from .evaluation.dynamic import evaluate_dynamically as evaluate_dynamically
from .evaluation.dynamic import gradient_statistics as gradient_statistics
from .evaluation.effective_context import relative_effective_context_length as relative_effective_context_length
from .evaluation.perplexity import evaluate as evaluate
from .evaluation.perplexity import evaluate_memory_lengths as evaluate_memory_lengths
from .evaluation.sliding import evaluate_sliding as evaluate_sliding
from .evaluation.sliding import losses_at_context as losses_at_context
from .evaluation.sliding import losses_at_contexts as losses_at_contexts
from .evaluation.stream import EvaluationResult as EvaluationResult
from .evaluation.surprisal import TokenSurprisal as TokenSurprisal
from .evaluation.surprisal import surprisals as surprisals
from .evaluation.tuning import CacheTuning as CacheTuning
from .evaluation.tuning import DynamicTuning as DynamicTuning
from .evaluation.tuning import tune_cache as tune_cache
from .evaluation.tuning import tune_dynamic as tune_dynamic
from .generation.engine import DecodeEngine as DecodeEngine
from .generation.sampling import Sampling as Sampling
from .generation.text import generate as generate
from .generation.text import generate_samples as generate_samples
from .generation.text import generate_tokens as generate_tokens
from .models import build_model as build_model
from .models.cache import ContinuousCache as ContinuousCache
from .models.language_model import LanguageModel as LanguageModel
from .models.transformer_xl import TransformerXL as TransformerXL
from .presets import preset as preset
from .presets import presets as presets
from .reporting.report import write_report as write_report
from .runs.directory import load as load
from .training.trainer import Trainer as Trainer

__version__: str
