"""`txl attention DIR`: where the heads of a model look (Appendix D)."""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

from txl.commands.options import (
    add_checkpoint,
    add_config_options,
    add_data_dir,
    add_device,
    add_json,
    add_memory_options,
    bounded_int,
    existing_run,
    memory_settings,
    numbers,
    pick_device,
    print_json,
    progress_bar,
    say,
    writable_folder,
)
from txl.errors import UserError


def add_parser(commands: Any) -> None:
    """Add the command to the command line."""
    parser = commands.add_parser("attention", help="show where the heads look, by distance and in the text")
    parser.add_argument("directory", metavar="DIR", help="a run directory")
    parser.add_argument("--split", default="valid", metavar="NAME", help="train, valid or test (default: valid)")
    parser.add_argument("--tokens", type=_count, default=100_000, metavar="N", help="tokens to read (100000), or all")
    add_memory_options(parser)
    parser.add_argument("--segment", type=int, metavar="T", help="tokens of a lane in one step")
    parser.add_argument("--batch", type=int, metavar="B", help="lanes read in parallel")
    parser.add_argument("--min-keys", type=int, metavar="N", help="average over tokens that see N keys (full memory)")
    parser.add_argument("--layers", type=numbers, metavar="N,N,...", help="only these layers, counted from 1")
    parser.add_argument(
        "--heads", type=_heads, metavar="L:H,...", help="show these heads in the text (default: those looking farthest)"
    )
    parser.add_argument("--positions", type=numbers, metavar="P,P,...", help="... at these tokens of the split")
    parser.add_argument("--rows", type=int, default=16, metavar="N", help="... and so many tokens up to them (16)")
    parser.add_argument("--seed", type=int, default=1, metavar="S", help="draws the position, if none is given (1)")
    parser.add_argument("--far", type=int, metavar="K", help="count attention at K tokens or farther (half the reach)")
    parser.add_argument(
        "--terms", action=argparse.BooleanOptionalAction, help="the score's terms apart (default: if the model has any)"
    )
    parser.add_argument("--out", metavar="FOLDER", help="where to write (default: DIR/attention)")
    add_config_options(parser, ("data",))
    add_checkpoint(parser)
    add_data_dir(parser)
    add_device(parser)
    add_json(parser)
    parser.set_defaults(run=run)


def _count(text: str) -> int | None:
    return None if text.lower() == "all" else bounded_int(text)


_count.__name__ = "number or all"  # argparse names a type by its function when it refuses a value


def _heads(text: str) -> list[tuple[int, int]]:
    pairs = [part.split(":") for part in text.split(",")]
    return [(bounded_int(layer) - 1, bounded_int(head) - 1) for layer, head in pairs]


_heads.__name__ = "list of LAYER:HEAD"


def run(arguments: argparse.Namespace) -> None:
    """Average, write figures, page and record, and print which heads look farthest."""
    from txl.allocator import keep_freed_memory
    from txl.analysis.attention import average_attention, reach
    from txl.analysis.attention_record import attention_record
    from txl.analysis.observation import attentions, known_terms
    from txl.commands.evaluate import open_run_corpus, split_tokens
    from txl.evaluation.perplexity import resolved_lengths
    from txl.run_directory import RunDirectory

    keep_freed_memory()
    run_directory = RunDirectory(existing_run(arguments.directory))
    config = run_directory.config()
    checkpoint = run_directory.checkpoint(arguments.checkpoint)
    model, vocabulary = run_directory.load(checkpoint, device=pick_device(arguments.device))
    found_attentions = attentions(model)
    n_head, n_layer = found_attentions[0].n_head, len(found_attentions)
    layers = None if arguments.layers is None else [layer - 1 for layer in arguments.layers]
    _check_heads(arguments.heads, layers, n_layer, n_head)
    corpus = open_run_corpus(run_directory, vocabulary, arguments)
    tokens = split_tokens(corpus, arguments.split)
    settings = memory_settings(arguments, config)
    if arguments.tokens is not None and arguments.tokens < 2:
        raise UserError(f"--tokens is {arguments.tokens}; expected 2 or more, or all")
    segment = config.eval.segment if arguments.segment is None else arguments.segment
    span = reach(resolved_lengths(model.init_state(1, **settings)), segment)
    far = max(1, span // 2) if arguments.far is None else arguments.far
    if not 1 <= far < max(2, span):
        raise UserError(f"--far is {far}; expected 1 to {span - 1}: no token sees farther")
    n_read = min(len(tokens), arguments.tokens or len(tokens))
    settings |= {
        "segment": segment,
        "batch_size": _lanes(n_read, settings, config.eval.batch_size) if arguments.batch is None else arguments.batch,
        "max_tokens": arguments.tokens,
    }
    positions = arguments.positions
    if positions is None:
        positions = [_drawn(n_read, settings, arguments)]
    out = writable_folder(arguments.out or run_directory.path / "attention")
    progress, move = progress_bar(f"{arguments.split} split", quiet=arguments.json)
    with progress:
        found = average_attention(
            model,
            tokens,
            **settings,
            min_keys=arguments.min_keys,
            terms=arguments.terms,
            layers=layers,
            positions=positions,
            rows=arguments.rows,
            progress=move,
        )
    assert vocabulary is not None  # open_run_corpus has refused None
    record = attention_record(
        found,
        far=far,
        heads=arguments.heads or found.farthest(),
        tokens=tokens,
        vocabulary=vocabulary,
        described={
            "corpus": corpus.name,
            "split": arguments.split,
            "unit": corpus.unit,
            "checkpoint": checkpoint.name,
        },
    )
    if not known_terms(model) and arguments.terms is None:
        say("note: no terms of the score apart (Figure 7): this model's positions are absolute")
    paths = _write(record, out, str(arguments.directory))
    if arguments.json:
        print_json({**record, "files": [str(path) for path in paths]})
    else:
        _print(record, out)


def _check_heads(heads: list[tuple[int, int]] | None, layers: list[int] | None, n_layer: int, n_head: int) -> None:
    for layer, head in heads or ():
        if not (0 <= layer < n_layer and 0 <= head < n_head):
            raise UserError(
                f"there is no head {layer + 1}:{head + 1}: this model has layers 1 to {n_layer} of {n_head} heads each"
            )
        if layers is not None and layer not in layers:
            raise UserError(f"--heads has {layer + 1}:{head + 1}, but layer {layer + 1} is not among --layers")


def _lanes(n_token: int, settings: dict[str, Any], most: int) -> int:
    """Lanes long enough that the memory is full in three quarters of each, but at most so many."""
    reach = settings["window"] if isinstance(settings["window"], int) else settings["mem_len"] + 1
    return max(1, min(most, n_token // (4 * reach)))


def _drawn(n_token: int, settings: dict[str, Any], arguments: argparse.Namespace) -> int:
    """A position of the second half of a lane, where memory is as full as it gets."""
    batch = max(1, settings["batch_size"])
    length = n_token // batch
    low = max(length // 2, arguments.rows - 1)
    if low > length - 2:
        raise UserError(
            f"{n_token} tokens in {batch} lanes leave {length} a lane, too few for --rows {arguments.rows}; "
            f"lower --batch or --rows, or read more tokens"
        )
    draw = random.Random(arguments.seed)
    return draw.randrange(batch) * length + draw.randint(low, length - 2)


def _write(record: dict[str, Any], out: Path, name: str) -> list[Path]:
    """The record last of all, so that it never speaks of figures that are not there."""
    from txl.files import write_whole
    from txl.reporting.attention import RECORD, attention_page, save_figures

    try:
        out.mkdir(parents=True, exist_ok=True)
        paths = save_figures(record, out)
    except OSError as error:
        raise UserError(f"{out}: cannot be written ({error.strerror})") from None
    write_whole(out / "attention.html", attention_page(record, name))
    write_whole(out / RECORD, json.dumps(record, ensure_ascii=False) + "\n")
    return [*paths, out / "attention.html", out / RECORD]


def _print(record: dict[str, Any], out: Path) -> None:
    from rich.console import Console
    from rich.table import Table

    settings = record["settings"]
    table = Table(
        title=f"farthest-looking heads, {settings['queries']:,} tokens of the {settings['split']} split",
        caption="even: a head that looked at all keys alike",
    )
    for column in ("layer", "head", "mean distance", f"at {settings['far']:,} or farther", "effective keys"):
        table.add_column(column, justify="right")
    for row in sorted(record["heads"], key=lambda row: -row["mean_distance"])[:8]:
        figures = (f"{row['mean_distance']:.1f}", f"{row['share_beyond']:.1%}", f"{row['effective_keys']:.1f}")
        table.add_row(str(row["layer"]), str(row["head"]), *figures)
    even = record["even"]
    table.add_section()
    table.add_row(
        "even", "", f"{even['mean_distance']:.1f}", f"{even['share_beyond']:.1%}", f"{even['effective_keys']:.1f}"
    )
    Console().print(table)
    made = "figures 5 to 7" if record["terms"] else "figures 5 and 6"
    print(f"{out / 'attention.html'}: {made}, and the text with what is attended to marked")
