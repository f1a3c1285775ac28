"""`txl attention DIR`: attention of a model's heads, by distance and in the text (Appendix D)."""

from __future__ import annotations

import argparse
from pathlib import Path

from txl.commands.arguments import pick_device, run_corpus, run_to_read, tested_lengths, writable_folder
from txl.commands.options import (
    add_memory_options,
    add_out,
    add_run_options,
    number_or_all,
    numbers,
)
from txl.commands.output import print_json, print_table, progress_bar, say
from txl.commands.parser import Commands, typed
from txl.config import whole_number
from txl.files import JsonObject


def add_parser(commands: Commands) -> None:
    """Add the command to the command line."""
    parser = commands.add_parser(
        "attention",
        help="show where the heads look, by distance and in the text",
        example="txl attention runs/mine --tokens 20000",
        description="Average every head's attention by distance, find the heads that look farthest, and show in the "
        "text what they look at (Appendix D): a page, figures and a JSON record.",
    )
    parser.add_argument("directory", metavar="DIR", help="a run directory")
    add_out(parser, "DIR", "where to write (default: DIR/attention)")
    parser.add_argument("--split", default="valid", metavar="NAME", help="train, valid or test (default: valid)")
    parser.add_argument(
        "--tokens",
        dest="max_tokens",
        type=number_or_all,
        default=100_000,
        metavar="N",
        help="tokens to read, or all (default: 100000)",
    )
    parser.add_argument("--segment", type=int, metavar="T", help="tokens of each lane in one step")
    parser.add_argument("--batch", type=int, metavar="B", help="lanes: parts of the text that are read in parallel")
    parser.add_argument(
        "--min-keys",
        type=int,
        metavar="N",
        help="average over tokens that attend to N keys or more (default: a full memory)",
    )
    parser.add_argument(
        "--far", type=int, metavar="K", help="a distance of K tokens or more is far (default: half of the longest)"
    )
    parser.add_argument(
        "--terms",
        action=argparse.BooleanOptionalAction,
        help="show the terms of the attention score apart (default: if the model has them)",
    )
    shown = parser.group("what the page shows")
    shown.add_argument("--layers", type=numbers, metavar="N,N,...", help="these layers alone, counted from 1")
    shown.add_argument(
        "--heads", type=_heads, metavar="L:H,...", help="these heads in the text (default: those that look farthest)"
    )
    shown.add_argument(
        "--positions", type=numbers, metavar="P,P,...", help="attention at these tokens of the split (default: random)"
    )
    shown.add_argument(
        "--rows",
        type=int,
        default=16,
        metavar="N",
        help="also show the N tokens that end at each position (default: 16)",
    )
    shown.add_argument(
        "--seed", type=int, default=1, metavar="S", help="draws a position, if none is given (default: 1)"
    )
    add_memory_options(parser)
    add_run_options(parser)
    parser.set_defaults(run=run)


@typed("pairs LAYER:HEAD separated by commas")
def _heads(text: str) -> list[tuple[int, int]]:
    pairs = [part.split(":") for part in text.split(",")]
    return [(whole_number(layer) - 1, whole_number(head) - 1) for layer, head in pairs]


def run(arguments: argparse.Namespace) -> None:
    """Average the attention, write figures, page and record, and print the heads that look farthest."""
    run_directory, config, checkpoint = run_to_read(arguments)
    from txl.analysis.attention_record import analyse_attention
    from txl.analysis.average_attention import AttentionPlan
    from txl.devices import keep_freed_memory
    from txl.evaluation.stream import Settings
    from txl.reporting.attention_page import write_attention

    keep_freed_memory()
    settings = Settings(
        segment=config.eval.segment if arguments.segment is None else arguments.segment,
        batch_size=config.eval.batch_size,
        max_tokens=None if arguments.max_tokens == "all" else arguments.max_tokens,
        **tested_lengths(arguments, config).options(),
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
    model, vocabulary = run_directory.load(checkpoint, device=pick_device(arguments.device))
    corpus = run_corpus(run_directory, vocabulary, arguments)
    corpus.tokens(arguments.split)  # refuses a split that does not exist
    assert vocabulary is not None  # run_corpus has refused None
    out = writable_folder(arguments.out or run_directory.path / "attention")
    progress, move = progress_bar(f"{arguments.split} split", quiet=arguments.json)
    with progress:
        record = analyse_attention(
            model, vocabulary, corpus, arguments.split, settings, plan, checkpoint=checkpoint.name, progress=move
        )
    if not model.config.score_terms and arguments.terms is None:
        say("note: no terms of the score apart (Figure 7): this model's positions are absolute")
    paths = write_attention(record, out, str(arguments.directory))
    if arguments.json:
        print_json({**record, "files": [str(path) for path in paths]})
    else:
        _print(record, out)


def _print(record: JsonObject, out: Path) -> None:
    settings = record["settings"]
    farthest = sorted(record["heads"], key=lambda row: -row["mean_distance"])[:8]
    even = {"layer": "even", "head": "", **record["even"]}
    print_table(
        f"the heads that look farthest, on {settings['queries']:,} tokens of the {settings['split']} split",
        ("layer", "head", "mean distance", f"at {settings['far']:,} or farther", "effective keys"),
        [
            (
                str(row["layer"]),
                str(row["head"]),
                f"{row['mean_distance']:.1f}",
                f"{row['share_beyond']:.1%}",
                f"{row['effective_keys']:.1f}",
            )
            for row in (*farthest, even)
        ],
    )
    print("even: a head that would look at all keys alike")
    made = "figures 5 to 7" if record["terms"] else "figures 5 and 6"
    print(f"{out / 'attention.html'}: {made}, and what heads look at in the text")
