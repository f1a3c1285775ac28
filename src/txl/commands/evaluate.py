"""`txl eval DIR`: the loss of a trained model, at one memory length or many."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from txl.commands.dynamic_options import (
    add_dynamic_options,
    collect_statistics,
    dynamic_request,
    dynamic_text,
    refuse_divergence,
    with_preset,
)
from txl.commands.options import (
    add_checkpoint,
    add_config_options,
    add_data_dir,
    add_device,
    add_json,
    add_memory_options,
    config_options,
    data_config,
    memory_settings,
    numbers,
    pick_device,
    print_json,
    print_table,
    progress_bar,
    run_to_read,
    say,
)
from txl.errors import UserError
from txl.runs.events import EventName

if TYPE_CHECKING:
    from txl.data.corpora import Corpus
    from txl.data.vocabulary import Vocabulary
    from txl.runs.directory import RunDirectory


def add_parser(commands: Any) -> None:
    """Add the command to the command line."""
    parser = commands.add_parser("eval", help="measure perplexity, bits per character and bits per byte")
    parser.add_argument("directory", metavar="DIR", help="a run directory")
    parser.add_argument(
        "--split",
        default="test",
        metavar="NAME",
        help="train, valid, test (default), or all: a text of yours as a whole",
    )
    add_memory_options(parser)
    parser.add_argument("--mem-lens", type=numbers, metavar="M,M,...", help="measure at several memory lengths")
    parser.add_argument("--segment", type=int, metavar="T", help="tokens of a lane in one step")
    parser.add_argument("--batch", type=int, metavar="B", help="lanes read in parallel")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="read only the first N tokens of the split")
    parser.add_argument("--temperature", type=float, metavar="X", help="of the softmax (default: the run's)")
    parser.add_argument(
        "--sliding", type=int, metavar="L", help="predict each token from a window of L tokens of its own, recomputed"
    )
    add_cache_options(parser)
    add_dynamic_options(parser)
    parser.add_argument("--exhaustive", action="store_true", help="score also the targets that equal lanes drop")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="arithmetic (autocast)")
    add_config_options(parser, ("data",))
    add_checkpoint(parser)
    add_data_dir(parser)
    add_device(parser)
    add_json(parser)
    parser.set_defaults(run=run)


def add_cache_options(parser: argparse.ArgumentParser) -> None:
    """A continuous cache around the model."""
    parser.add_argument("--cache-size", type=int, metavar="N", help="with a continuous cache of the last N tokens")
    parser.add_argument("--cache-theta", type=float, metavar="X", help="its theta (txl cache finds both)")
    parser.add_argument("--cache-lambda", type=float, metavar="X", help="its share of the probability")


def with_cache(model: Any, arguments: argparse.Namespace) -> Any:
    """The model, in a continuous cache if the options ask for one.

    Raises:
        UserError: if only some of the options are given, or one is out of its range.
    """
    names = ("cache_size", "cache_theta", "cache_lambda")
    missing = [f"--{name.replace('_', '-')}" for name in names if getattr(arguments, name) is None]
    if len(missing) == len(names):
        return model
    if missing:
        raise UserError(f"a continuous cache needs {' and '.join(missing)} too; txl cache finds theta and lambda")
    from txl.models.cache import ContinuousCache

    return ContinuousCache(model, *(getattr(arguments, name) for name in names))


def run(arguments: argparse.Namespace) -> None:
    """Evaluate, print, and add the result to the run's log."""
    if arguments.mem_lens is not None and arguments.mem_len is not None:
        raise UserError("--mem-len and --mem-lens were both given; expected one of them")
    if arguments.mem_lens is not None and arguments.window not in (None, "none"):
        raise UserError("--window with --mem-lens can only be none; without it each memory length is its own window")
    for name in ("mem_len", "mem_lens", "window", "segment"):
        if arguments.sliding is not None and getattr(arguments, name) is not None:
            raise UserError(f"--sliding and --{name.replace('_', '-')} were both given; a sliding window has none")
    run_directory, config, checkpoint = run_to_read(arguments)
    arguments = with_preset(arguments)
    dynamic = dynamic_request(arguments)
    from txl.allocator import keep_freed_memory
    from txl.data.corpora import is_named
    from txl.data.sources import WHOLE
    from txl.evaluation.dynamic import evaluate_dynamically
    from txl.evaluation.perplexity import evaluate, evaluate_memory_lengths
    from txl.evaluation.sliding import evaluate_sliding

    keep_freed_memory()
    device = pick_device(arguments.device)
    model, vocabulary = run_directory.load(checkpoint, device=device)
    model = with_cache(model, arguments)
    whole = arguments.split == WHOLE
    corpus = open_run_corpus(run_directory, vocabulary, arguments, whole)
    tokens = split_tokens(corpus, arguments.split)

    settings = memory_settings(arguments, config)
    common = {
        "segment": config.eval.segment if arguments.segment is None else arguments.segment,
        "batch_size": config.eval.batch_size if arguments.batch is None else arguments.batch,
        "max_tokens": arguments.max_tokens,
        "exhaustive": arguments.exhaustive,
        "temperature": config.eval.temperature if arguments.temperature is None else arguments.temperature,
        "dtype": arguments.dtype,
    }
    described = {
        "split": arguments.split,
        "corpus": corpus.name,
        "unit": corpus.unit,
        "sha256_text": corpus.info()["splits"][arguments.split]["sha256_text"],
        "checkpoint": checkpoint.name,
    }
    statistics = None
    if dynamic is not None:
        if arguments.batch is None:
            common["batch_size"] = 1  # with more lanes it is another algorithm
        training_split = partial(training_tokens, run_directory, vocabulary, corpus, arguments)
        statistics = collect_statistics(model, training_split, dynamic, settings | common, quiet=arguments.json)
    progress, move = progress_bar(f"{arguments.split} split", quiet=arguments.json)
    with progress:
        if dynamic is not None:
            adapted = evaluate_dynamically(
                model, tokens, dynamic.adaptation, statistics, **settings, **common, progress=move
            )
            results = [refuse_divergence(adapted)]
        elif arguments.sliding is not None:
            batch = {} if arguments.batch is None else {"batch_size": arguments.batch}
            common = {name: common[name] for name in ("max_tokens", "dtype", "temperature")} | batch
            common["clamp_len"] = settings["clamp_len"]
            results = [evaluate_sliding(model, tokens, context=arguments.sliding, **common, progress=move)]
        elif arguments.mem_lens is None:
            results = [evaluate(model, tokens, **settings, **common, progress=move)]
        else:
            common |= {"clamp_len": settings["clamp_len"], "window": arguments.window}
            results = evaluate_memory_lengths(model, tokens, arguments.mem_lens, **common, progress=move)
    refuse_not_a_number([result.nll for result in results], checkpoint)
    read = results[0].tokens + results[0].dropped + 1
    part, hint = measured_part(corpus, arguments.split, read), None
    if is_trained_on(run_directory, corpus, whole):
        part += ", its training text included" if whole else ""
    elif not whole and not is_named(corpus.name):
        hint = f"--split {WHOLE} measures everything"
    described["measured"] = part
    rows = [described | result.to_dict() for result in results]

    step = checkpoint_step(checkpoint)
    if arguments.mem_lens is None:
        record(run_directory, EventName.EVAL, step, **rows[0])
        shown: dict[str, Any] = rows[0]
    else:
        record(run_directory, EventName.SWEEP, step, **described, rows=rows)
        shown = described | {"rows": rows}
    if arguments.json:
        if hint is not None:
            say(f"note: measured: {part}; {hint}")
        print_json(shown)
    else:
        print_rows(rows)
        for note in corpus.notes(arguments.split, trained_unknown(run_directory)):
            say(f"note: {note}")
        if whole or hint is not None:
            print("; ".join(["measured: " + part, *([hint] if hint else [])]))
    if arguments.mem_lens is not None:
        draw_curve(run_directory.path, rows)


def refuse_not_a_number(losses: list[float], checkpoint: Path) -> None:
    """Weights that are damaged, or of a training that diverged, give no result.

    Raises:
        UserError: if a loss is not a number.
    """
    if any(math.isnan(loss) for loss in losses):
        raise UserError(
            f"{checkpoint}: the model's losses are not numbers: training diverged, or it is damaged; use another one"
        )


def open_run_corpus(
    run_directory: RunDirectory, vocabulary: Vocabulary | None, arguments: Any, whole: bool = False
) -> Corpus:
    """The corpus that the run was trained on, or the one the options name, in the run's own vocabulary.

    Args:
        run_directory: the run's.
        vocabulary: the run's.
        arguments: with the options of `data` and `data_dir`.
        whole: as one split, "all".

    Raises:
        UserError: if the run has no vocabulary, or the corpus cannot be opened.
    """
    from txl.data.corpora import is_named, open_corpus, with_absolute_paths
    from txl.data.vocabulary import ByteVocabulary

    if vocabulary is None:
        raise UserError(f"{run_directory.path} has no vocabulary, so no text can be read; give one when importing")
    options = config_options(arguments)
    own, started = with_absolute_paths(run_directory.config().data), run_directory.started()
    data = data_config(arguments, own)
    if "data.unit" in options and data.unit != vocabulary.kind:
        raise UserError(f"--data.unit is {data.unit}, but this model reads {vocabulary.kind} tokens; leave it out")
    # Where preparing the text by itself gives the run's vocabulary, that was done when the run was trained.
    prepared_it = is_named(own.corpus) if started is None else not started.get("init_from")
    made_of_it = data.corpus == own.corpus and prepared_it
    corpus = None
    if (made_of_it and not whole) or vocabulary == ByteVocabulary():
        corpus = open_corpus(data.corpus, config=data, data_dir=arguments.data_dir, quiet=arguments.json, whole=whole)
    if corpus is None or corpus.vocabulary != vocabulary:
        corpus = open_corpus(
            data.corpus,
            config=data,
            data_dir=arguments.data_dir,
            vocabulary=vocabulary,
            quiet=arguments.json,
            whole=whole,
        )
    if not options and not whole and not is_trained_on(run_directory, corpus):
        say(f"note: {corpus.name} on this machine is not the text that this model was trained on")
    return corpus


def trained_unknown(run_directory: RunDirectory) -> float | None:
    """The share of the run's training text that is `<unk>`; None where its log does not say."""
    train = run_directory.trained_on().get("splits", {}).get("train")
    return None if not train or "unknown" not in train else train["unknown"] / train["tokens"]


def is_trained_on(run_directory: RunDirectory, corpus: Corpus, whole: bool = False) -> bool:
    """Whether a corpus is the text that a run was trained on.

    An imported model is taken to be trained on the corpus that its configuration names. A text that is read as a whole
    has other tokens than in training, and is known by its path.
    """
    trained_on = run_directory.trained_on().get("identity")
    if whole or trained_on is None:
        from txl.data.corpora import absolute_path

        return corpus.name == absolute_path(run_directory.config().data.corpus)
    return trained_on == corpus.info()["identity"]


def measured_part(corpus: Corpus, split: str, n_read: int) -> str:
    """Which part of a corpus the first `n_read` tokens of a split are, in words."""
    from txl.data.corpora import is_named
    from txl.data.sources import WHOLE, is_cut

    sizes = {name: record["bytes"] for name, record in corpus.info()["splits"].items()}
    size = f"{sizes[split]:,} of its {sum(sizes.values()):,} bytes"
    if split == WHOLE:
        part = f"all of {corpus.name}, {sizes[split]:,} bytes"
    elif not is_named(corpus.name) and is_cut(corpus.name):
        cuts = {"train": "the first 90%", "valid": "the 5% behind the first 90%", "test": "the last 5%"}
        part = f"{cuts[split]} of {corpus.name}, {size}"
    else:
        part = f"the {split} split of {corpus.name}, {size}"
    n_token = len(corpus.tokens(split))
    return part if n_read == n_token else f"the first {n_read:,} of {n_token:,} tokens of {part}"


def trained_identity(run_directory: RunDirectory) -> str | None:
    """The identity of the corpus that a run was trained on; None where the log does not say."""
    return run_directory.trained_on().get("identity")


def split_tokens(corpus: Corpus, split: str) -> Any:
    """The tokens of a split.

    Raises:
        UserError: naming the splits that there are.
    """
    if split not in corpus.splits:
        raise UserError(f"{corpus.name} has no split {split!r}; expected one of {', '.join(corpus.splits)}")
    return corpus.tokens(split)


def training_tokens(run_directory: RunDirectory, vocabulary: Vocabulary | None, corpus: Corpus, arguments: Any) -> Any:
    """The training split of the corpus that the run was trained on, also where the options name another one.

    Of an imported model that is not known: there it is the training split of `corpus`.

    Raises:
        UserError: if it cannot be opened.
    """
    identity = trained_identity(run_directory)
    if identity is not None and identity != corpus.info()["identity"]:
        own = argparse.Namespace(**{name: value for name, value in vars(arguments).items() if "." not in name})
        corpus = open_run_corpus(run_directory, vocabulary, own)
    return split_tokens(corpus, "train")


def checkpoint_step(checkpoint: Path) -> int:
    """The training step of a checkpoint's directory, step-NNNNNNNN."""
    return int(checkpoint.name.rpartition("-")[2])


def record(run_directory: RunDirectory, event: EventName, step: int, **fields: Any) -> None:
    """Add an event to the run's log; a run that cannot be written is only read, and that is said."""
    try:
        run_directory.append(event, step, **fields)
    except (OSError, UserError) as error:
        say(f"note: the result was not added to the run's log ({error})")


def print_rows(rows: list[dict[str, Any]]) -> None:
    """A table of results, with what was scored below it."""
    from txl.reporting.wording import split_text
    from txl.units import ppl_text

    by_word = rows[0]["unit"] in ("word", "bpe")
    columns: list[tuple[str, Callable[[dict[str, Any]], str]]] = [
        ("memory", lambda row: str(row["mem_len"])),
        ("window", lambda row: "none" if row["window"] is None else str(row["window"])),
    ]
    if rows[0]["sliding"]:
        columns = [("sliding window", lambda row: str(row["segment"]))]
    columns += [
        ("nats/token", lambda row: f"{row['nll']:.4f}"),
        ("ppl", lambda row: ppl_text(row["ppl"])) if by_word else ("bpc", lambda row: f"{row['bpc']:.4f}"),
        ("bits/byte", lambda row: "" if row["bits_per_byte"] is None else f"{row['bits_per_byte']:.4f}"),
        ("tokens/s", lambda row: f"{row['tokens_per_second']:,.0f}"),
    ]
    if len({row["cache_size"] for row in rows}) > 1:
        columns.insert(0, ("cache", lambda row: "none" if row["cache_size"] is None else f"{row['cache_size']:,}"))
    first = rows[0]
    print_table(
        f"{first['corpus']}, {split_text(first['split'])}, {first['checkpoint']}",
        [heading for heading, _ in columns],
        [[show(row) for _, show in columns] for row in rows],
    )
    dropped = f"; {first['dropped']:,} not scored (--exhaustive scores them)" if first["dropped"] else ""
    if first["sliding"]:
        print(f"{first['tokens']:,} targets, each from the {first['segment']} tokens before it alone")
    else:
        print(f"{first['tokens']:,} targets in {first['batch_size']} lanes, segments of {first['segment']}{dropped}")
    last = rows[-1]  # of `txl cache`, the one with a cache
    if last["cache_size"] is not None:
        shown = f"theta {last['cache_theta']:g}, lambda {last['cache_lambda']:g}"
        print(f"with a continuous cache of {last['cache_size']:,} tokens, {shown}")
    if first["dynamic"] is not None:
        print(dynamic_text(first["dynamic"]))
    if first["temperature"] != 1:
        print(f"softmax at temperature {first['temperature']:g}")
    if first["unknown"]:
        read = first["tokens"] + first["dropped"] + 1
        print(f"{first['unknown']:,} of the {read:,} tokens read are <unk>: bits per byte are a lower bound")


def draw_curve(directory: Path, rows: list[dict[str, Any]]) -> None:
    """The curve of quality against memory length, as memory-curve.svg and .png in the run directory."""
    from txl.reporting.plots import save_memory_curve

    try:
        for ending in ("svg", "png"):
            save_memory_curve(rows, directory / f"memory-curve.{ending}")
        say(f"curve: {directory / 'memory-curve.svg'} and .png")
    except OSError as error:
        say(f"note: the curve was not drawn ({error})")
