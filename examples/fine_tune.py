"""Fine-tune an imported checkpoint on a text of yours, and measure it before and after.

    python examples/fine_tune.py transfo-xl-wt103 --corpus my.txt --out runs/tuned
    python examples/fine_tune.py model.pt --vocabulary vocab.txt --corpus my.txt --out runs/tuned --steps 500

The checkpoint may be of any earlier implementation (docs/how-to/import.md); nothing in it is executed. The text is read
in the checkpoint's own vocabulary: words that it lacks become `<unk>`. Called again with the same options, a run that
was stopped goes on. `txl import`, `txl train --init-from` and `txl eval` do the same from the command line.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import txl
from txl.config import DataConfig
from txl.interop.import_run import checkpoint_path, import_run
from txl.interop.vocabulary_files import read_vocabulary
from txl.runs.directory import RunDirectory


def main() -> None:
    """Import, measure, train, measure again."""
    options = read_options()
    imported = options.out / "imported"

    # 1. The checkpoint becomes an ordinary run directory.
    if not imported.exists():
        vocabulary = None if options.vocabulary is None else read_vocabulary(options.vocabulary)
        _, notes = import_run(
            checkpoint_path(options.checkpoint), imported, vocabulary=vocabulary, data=DataConfig(corpus="")
        )
        for note in notes:
            print(f"note: {note}")
    model, vocabulary = txl.load(imported)
    if vocabulary is None:
        raise txl.UserError(f"{options.checkpoint} has no vocabulary with it; give one with --vocabulary")

    # 2. The text, in the vocabulary of the checkpoint; 5% of it each for validation and test.
    corpus = txl.open_corpus(options.corpus, vocabulary=vocabulary, data_dir=options.data_dir)
    test = corpus.tokens("test")
    before = measure(model, test, options)

    # 3. The configuration of the checkpoint, with the settings of this training: a small learning rate that falls to
    # zero, and validation often enough to keep the best checkpoint.
    run = RunDirectory(imported).config()
    run.name = "fine-tuned"
    run.data.corpus = options.corpus
    run.model.dropout = options.dropout
    run.train.steps, run.train.warmup_steps = options.steps, options.steps // 20
    run.train.batch_size, run.train.segment = options.batch_size, options.segment
    run.train.learning_rate = options.learning_rate
    run.train.eval_every = run.train.checkpoint_every = max(1, options.steps // 5)
    txl.Trainer(run, options.out / "tuned", init_from=imported, data_dir=options.data_dir).fit()

    # 4. What it brought, on text that neither training has seen.
    model, _ = txl.load(options.out / "tuned")  # the best checkpoint
    after = measure(model, test, options)
    print(f"perplexity on {after.tokens:,} tokens: {before.ppl:.2f} before, {after.ppl:.2f} after")


def measure(model: txl.LanguageModel, test, options: argparse.Namespace) -> txl.EvaluationResult:
    """Return the loss on the test split, read in segments with the model's own memory."""
    return txl.evaluate(model, test, segment=options.segment, max_tokens=options.eval_tokens)


def read_options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Fine-tune an imported checkpoint, and measure it before and after.")
    parser.add_argument("checkpoint", help="a file, a directory, or a model's name on the Hugging Face Hub")
    parser.add_argument("--vocabulary", type=Path, help="its vocabulary, where the checkpoint brings none")
    parser.add_argument("--corpus", required=True, help="a text file, folder or glob, or a known corpus")
    parser.add_argument("--out", type=Path, default=Path("runs/tuned"), help="folder of both runs (runs/tuned)")
    parser.add_argument("--data-dir", help="folder of prepared text (default: the user's cache)")
    parser.add_argument("--steps", type=int, default=1000, help="updates (1000)")
    parser.add_argument("--batch-size", type=int, default=8, help="lanes read in parallel (8)")
    parser.add_argument("--segment", type=int, default=64, help="tokens of a lane in one step (64)")
    parser.add_argument("--learning-rate", type=float, default=1e-4, help="peak learning rate (0.0001)")
    parser.add_argument("--dropout", type=float, default=0.1, help="dropout (0.1)")
    parser.add_argument("--eval-tokens", type=int, default=100_000, help="tokens of the test split to read (100,000)")
    return parser.parse_args()


if __name__ == "__main__":
    try:
        main()
    except (txl.UserError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
