"""Make Figures 5 to 7 and the samples of Appendix E from a trained model."""

from __future__ import annotations

from pathlib import Path

from txl.analysis.attention_record import analyse_attention
from txl.analysis.samples import Plan, make_samples
from txl.config import RunConfig
from txl.data.detokenise import convention_of
from txl.data.prepared import Corpus
from txl.data.vocabulary import Vocabulary
from txl.errors import UserError
from txl.models.language_model import LanguageModel
from txl.reporting.attention_page import write_attention
from txl.reporting.samples_page import About, settings_text, write_samples
from txl_lab.paper.scales import Scale
from txl_lab.paper.schema import Product

_ATTENTION_SPLIT, _SAMPLES_SPLIT = "valid", "test"


def make_product(
    product: Product,
    model: LanguageModel,
    vocabulary: Vocabulary,
    run: RunConfig,
    corpus: Corpus,
    scale: Scale,
    directory: Path,
    checkpoint: str,
    out: Path,
) -> list[Path]:
    """Make the figures of attention or the samples of a trained model, and return the files that were written.

    Args:
        product: product to make.
        model, vocabulary: model and vocabulary of the run.
        run: configuration of the run; its test settings are used.
        corpus: corpus that the model was trained on.
        scale: scale with the number of tokens to read for figures of attention.
        directory: run directory.
        checkpoint: name of the model's checkpoint.
        out: folder for the files; created if missing.
    """
    lengths = run.eval.lengths
    if product == "attention":
        record = analyse_attention(
            model,
            vocabulary,
            corpus,
            split=_ATTENTION_SPLIT,
            checkpoint=checkpoint,
            lengths=lengths,
            segment=run.eval.segment,
            most_lanes=run.eval.batch_size,
            max_tokens=scale.eval_tokens,
        )
        return write_attention(record, out, str(directory))
    plan = Plan(lengths=lengths)
    training = corpus.tokens("train")
    convention = convention_of(vocabulary)
    samples = make_samples(
        model, vocabulary, corpus.tokens(_SAMPLES_SPLIT), training, plan, convention=convention
    )  # fmt: skip
    about = About(
        str(directory),
        checkpoint,
        corpus.name,
        _SAMPLES_SPLIT,
        corpus.unit,
        convention,
        settings_text(plan),
        len(training),
    )
    return write_samples(samples, about, plan, out)[1]


def least_tokens_of(product: Product, run: RunConfig, scale: Scale) -> dict[str, int]:
    """Return the least number of tokens of each split that a product needs."""
    if product == "samples":
        return {_SAMPLES_SPLIT: Plan.context + Plan.max_tokens + Plan.count - 1}
    # Tokens up to the first one that sees all of the memory, and its target.
    least = (run.eval.window or run.eval.mem_len + 1) + 1
    if scale.eval_tokens is not None and scale.eval_tokens < least:
        raise UserError(
            f"--eval-tokens is {scale.eval_tokens}, but only after {least:,} tokens does a token see the whole memory; "
            f"expected {least:,} or more"
        )
    return {_ATTENTION_SPLIT: least}
