"""Train a Transformer-XL, measure it and let it write: the whole way in one file, with public functions alone.

    python examples/train.py                        # the Python standard library's own sources, about two minutes
    python examples/train.py --corpus my.txt --steps 2000

Read it from top to bottom. `txl train` does the same and more: checkpoints that survive a kill, evaluations while
training, several processes, a log and a report.

Shapes: B lanes, T tokens of a segment, V vocabulary.
"""

from __future__ import annotations

import argparse
import math
import sys
from dataclasses import replace

import numpy as np
import torch

import txl

RESET_MEMORY = 0.05
"""Probability that a lane's memory is emptied before a step: `train.reset_memory` of `txl train`."""


def main() -> None:
    """Train, evaluate, generate."""
    options = read_options()
    torch.manual_seed(options.seed)

    # 1. Text. The vocabulary maps text to token ids; each split is a memory-mapped array of them.
    corpus = txl.open_corpus(options.corpus, unit="byte", data_dir=options.data_dir)
    train, test = corpus.tokens("train"), corpus.tokens("test")
    print(f"{corpus.name}: {len(train):,} training tokens, vocabulary of {len(corpus.vocabulary)}")

    # 2. Model. A preset is a configuration with a name; every field of it can be changed.
    preset = txl.preset("stdlib-tiny").model
    config = replace(preset, n_layer=options.n_layer, d_model=options.d_model, mem_len=options.segment)
    model = txl.build_model(config, corpus.vocabulary)
    print(f"{sum(parameter.numel() for parameter in model.parameters()):,} parameters")

    # 3. Training.
    train_model(model, as_lanes(np.asarray(train), options.batch_size), options)

    # 4. Evaluation, as the paper does it: every target once, memory carried along, nats summed and divided by counts.
    # The same weights with more memory and with none show what memory is worth.
    for mem_len in (0, options.segment, 2 * options.segment):
        result = txl.evaluate(
            model,
            test,
            segment=options.segment,
            mem_len=mem_len,
            window=mem_len or "none",  # each token sees the newest `mem_len` positions, however the text is cut
            max_tokens=options.eval_tokens,
        )
        print(f"memory {mem_len:4}: {result.bpc:.3f} bits a byte on {result.tokens:,} tokens of the test split")

    # 5. Generation: pieces of text, as soon as they are whole characters.
    print("".join(txl.generate(model, corpus.vocabulary, options.prompt, max_tokens=options.max_tokens, seed=1)))


def as_lanes(tokens: np.ndarray, batch_size: int) -> torch.Tensor:
    """Cut a stream of tokens into B contiguous lanes: [N] -> int64 [B, N // B].

    Lane b goes on in segment s + 1 where it stopped in segment s. That is what lets memory be used: the positions
    that a lane's memory holds are the text right before its next segment (Section 3.2).
    """
    length = len(tokens) // batch_size
    whole = tokens[: length * batch_size].astype(np.int64)
    return torch.from_numpy(whole).view(batch_size, length)


def train_model(model: txl.LanguageModel, lanes: torch.Tensor, options: argparse.Namespace) -> None:
    """Train with segment-level recurrence.

    The state goes in and comes out: `state` holds the memory of every lane, which the next segment reads and no
    gradient enters.
    """
    batch_size, length = lanes.shape
    optimizer = torch.optim.Adam(model.parameters(), lr=options.learning_rate)
    state = model.init_state(batch_size)  # empty memory
    start = 0
    model.train()
    for step in range(1, options.steps + 1):
        if start + options.segment + 1 > length:  # the end of the text: a new epoch starts with empty memory
            start, state = 0, model.init_state(batch_size)
        tokens = lanes[:, start : start + options.segment]  # [B,T]
        targets = lanes[:, start + 1 : start + options.segment + 1]  # [B,T]: the next token of each
        start += options.segment
        # Now and then a lane's memory is emptied. Otherwise the model would hardly ever read without memory, and its
        # first predictions in a new text, such as after a prompt, would be nonsense.
        state = state.reset(torch.rand(batch_size) < RESET_MEMORY)

        loss, state = model.training_loss(tokens, targets, state)  # nats a token; the state comes out detached
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        for group in optimizer.param_groups:
            group["lr"] = options.learning_rate * schedule(step, options.steps)
        optimizer.step()

        if step % 20 == 0 or step == options.steps:
            print(f"step {step:5}: {loss.item() / math.log(2):.3f} bits a byte", flush=True)


def schedule(step: int, steps: int) -> float:
    """Give the learning rate's factor: up in a line over the first tenth, then down along a cosine to 0."""
    warmup = max(1, steps // 10)
    if step < warmup:
        return step / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


def read_options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Train a small Transformer-XL, measure it and let it write.")
    parser.add_argument("--corpus", default="stdlib", help="a text file, folder or glob, or a known corpus (stdlib)")
    parser.add_argument("--data-dir", help="folder of prepared text (default: the user's cache)")
    parser.add_argument("--steps", type=int, default=400, help="updates (400)")
    parser.add_argument("--batch-size", type=int, default=16, help="lanes B (16)")
    parser.add_argument("--segment", type=int, default=128, help="tokens T of a lane in one step (128)")
    parser.add_argument("--n-layer", type=int, default=4, help="layers (4)")
    parser.add_argument("--d-model", type=int, default=128, help="width of the hidden states (128)")
    parser.add_argument("--learning-rate", type=float, default=2e-3, help="peak learning rate (0.002)")
    parser.add_argument("--eval-tokens", type=int, default=100_000, help="tokens of the test split to read (100,000)")
    parser.add_argument("--prompt", default="def ", help="text to go on from")
    parser.add_argument("--max-tokens", type=int, default=300, help="bytes to generate (300)")
    parser.add_argument("--seed", type=int, default=1, help="seed of the first weights (1)")
    return parser.parse_args()


if __name__ == "__main__":
    try:
        main()
    except (txl.UserError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
