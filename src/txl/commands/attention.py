"""`txl attention DIR`: attention of a model's heads, by distance and in the text (Appendix D)."""

from __future__ import annotations

import argparse

from txl.commands import options
from txl.commands.output import print_json, print_table, progress_bar, say
from txl.commands.parser import Parser, option, typed
from txl.config import whole_number


@typed("pairs LAYER:HEAD separated by commas")
def _heads(text: str) -> list[tuple[int, int]]:
    pairs = [part.split(":") for part in text.split(",")]
    return [(whole_number(layer) - 1, whole_number(head) - 1) for layer, head in pairs]


def add_parser(commands: Parser) -> None:
    """Add the command to the command line."""
    parser = commands.add_command(
        "attention",
        help="show where the heads look, by distance and in the text",
        example="txl attention runs/mine --tokens 20000",
        description="Average every head's attention by distance, find the heads that look farthest, and show in the "
        "text what they look at (Appendix D): a page, figures and a JSON record.",
    )
    options.shared(parser, "directory")
    options.add_out(parser, "DIR", "where to write (default: DIR/attention)")
    option(parser, "--split", "NAME", "train, valid or test", default="valid")
    option(parser, "--tokens", "N", "tokens to read, or all", options.number_or_all, 100_000).dest = "max_tokens"
    options.shared(parser, "segment", "batch", "checkpoint")
    option(parser, "--min-keys", "N", "average over tokens that attend to N keys or more (default: a full memory)", int)
    option(parser, "--far", "K", "a distance of K tokens or more is far (default: half of the longest)", int)
    parser.add_argument(
        "--terms",
        action=argparse.BooleanOptionalAction,
        help="show the terms of the attention score apart (default: if the model has them)",
    )
    shown = parser.add_argument_group("what the page shows")
    option(shown, "--layers", "N,N,...", "these layers alone, counted from 1", options.numbers)
    option(shown, "--heads", "L:H,...", "these heads in the text (default: those that look farthest)", _heads)
    option(shown, "--positions", "P,P,...", "attention at these tokens of the split (default: random)", options.numbers)
    option(shown, "--rows", "N", "also show the N tokens that end at each position", int, 16)
    option(shown, "--seed", "S", "draws a position, if none is given", int, 1)
    options.add_memory_options(parser)
    options.add_run_options(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Average the attention, write figures, page and record, and print the heads that look farthest."""
    run_directory, config, checkpoint = options.run_to_read(arguments)
    from txl.analysis.attention_record import analyse_attention
    from txl.analysis.average_attention import AttentionPlan
    from txl.evaluation.stream import Settings
    from txl.reporting.attention_page import write_attention

    settings = Settings(
        segment=arguments.segment or config.eval.segment,
        batch_size=config.eval.batch_size,
        max_tokens=None if arguments.max_tokens == "all" else arguments.max_tokens,
        **options.tested_lengths(arguments, config).options(),
    )
    plan = AttentionPlan(
        layers=None if arguments.layers is None else [layer - 1 for layer in arguments.layers],
        min_keys=arguments.min_keys,
        terms=arguments.terms,
        far=arguments.far,
        heads=arguments.heads,
        positions=arguments.positions,
        rows=arguments.rows,
        seed=arguments.seed,
        lanes=arguments.batch,
    )
    model, vocabulary = options.load_to_read(run_directory, checkpoint, options.pick_device(arguments.device))
    corpus = options.run_corpus(run_directory, vocabulary, arguments)
    corpus.tokens(arguments.split)  # refuses a split that does not exist
    out = options.writable_folder(arguments.out or run_directory.path / "attention")
    with progress_bar(f"{arguments.split} split", quiet=arguments.json) as move:
        record = analyse_attention(
            model, vocabulary, corpus, arguments.split, settings, plan, checkpoint=checkpoint.name, progress=move
        )
    if not model.config.score_terms and arguments.terms is None:
        say("note: no terms of the score apart (Figure 7): this model's positions are absolute")
    paths = write_attention(record, out, str(arguments.directory))
    if arguments.json:
        print_json({**record, "files": [str(path) for path in paths]})
        return
    used, farthest = record["settings"], sorted(record["heads"], key=lambda row: -row["mean_distance"])[:8]
    shown = {"layer": "", "head": "", "mean_distance": ".1f", "share_beyond": ".1%", "effective_keys": ".1f"}
    rows = [
        [format(row[name], form) for name, form in shown.items()]
        for row in (*farthest, {"layer": "even", "head": "", **record["even"]})
    ]
    print_table(
        f"the heads that look farthest, on {used['queries']:,} tokens of the {used['split']} split",
        ("layer", "head", "mean distance", f"at {used['far']:,} or farther", "effective keys"),
        rows,
    )
    print("even: a head that would look at all keys alike")
    made = "figures 5 to 7" if record["terms"] else "figures 5 and 6"
    print(f"{out / 'attention.html'}: {made}, and what heads look at in the text")
