"""`txl import PATH --out DIR`: convert a checkpoint of an earlier implementation into a run."""

from __future__ import annotations

import argparse
import dataclasses
import shlex
from pathlib import Path

from txl.commands.arguments import check_corpus
from txl.commands.config_options import add_config_options, config_options
from txl.commands.options import add_json, add_out
from txl.commands.output import print_json
from txl.commands.parser import Commands
from txl.config import shown
from txl.errors import UserError
from txl.files import check_new_directory

_NOT_IN_SHAPES = (
    *("mem_len", "window", "clamp_len", "pre_norm", "layer_norm_eps", "cutoffs", "div_val"),
    *("dropout", "dropatt"),
)
"""Fields of the model that a file may fail to state, since shapes of tensors do not tell them, and the two rates of
dropout that training continues with. Other fields are accepted, for instance to check them, but not listed."""
_PRINTED = ("n_layer", "d_model", "n_head", "d_head", "d_inner", "cutoffs", "div_val", "mem_len", "window", "clamp_len")
"""Fields of the model that the command prints; config.json has them all."""


def add_parser(commands: Commands) -> None:
    """Add the command to the command line."""
    parser = commands.add_parser(
        "import",
        help="read a checkpoint of an earlier implementation",
        example="txl import model.pt --vocabulary vocab.txt --out runs/imported",
        description="Read a checkpoint of an earlier implementation and write it as a run: the authors' model.pt or "
        "TensorFlow checkpoint, a directory of Hugging Face's or a model's name on its Hub, or NVIDIA's checkpoint. No "
        "code in the files is executed.",
        add_help=False,
    )
    parser.add_argument("path", metavar="PATH", help="a file, a directory, or a model's name on the Hugging Face Hub")
    add_out(parser, "DIR", "the run directory to write", required=True)
    parser.add_argument(
        "--vocabulary",
        metavar="FILE",
        help="vocab.pkl, vocab.bin, cache.pt, cache.pkl, vocab.txt (one symbol a line), or vocabulary.json of a run",
    )
    parser.add_argument("--corpus", metavar="NAME", default="", help="corpus that txl eval reads by default")
    add_config_options(parser, ("model",), "transformer-xl", help_fields=_NOT_IN_SHAPES)
    add_json(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Import the checkpoint, and print the recovered configuration."""
    from txl.config import RunConfig, TransformerXLConfig, chosen_family, with_options
    from txl.data.corpora import with_absolute_paths
    from txl.interop.source import checkpoint_path

    options = config_options(arguments)
    base = RunConfig()
    base.data.corpus = arguments.corpus
    of_model = {name.removeprefix("model."): value for name, value in options.items() if name.startswith("model.")}
    if chosen_family(of_model) is not TransformerXLConfig:
        problem = "only checkpoints of Transformer-XL are imported"
        raise UserError(problem, remedy="leave out the options of other families")
    stated = with_options(base, options)
    given = {name.replace("-", "_") for name in of_model}
    given &= {item.name for item in dataclasses.fields(stated.model) if item.init}
    check_corpus(arguments.corpus)
    stated.data = with_absolute_paths(stated.data)
    out = Path(arguments.out)
    check_new_directory(out)
    path = checkpoint_path(arguments.path, quiet=arguments.json)
    from txl.interop.import_run import import_run
    from txl.interop.vocabularies import read_vocabulary

    vocabulary = None if arguments.vocabulary is None else read_vocabulary(Path(arguments.vocabulary))
    if vocabulary is not None:
        vocabulary.seen = None  # the weights may have been trained on another text than the vocabulary's run
    config, notes = import_run(
        path,
        out,
        vocabulary=vocabulary,
        model_options={name: getattr(stated.model, name) for name in given},
        data=stated.data,
        name=None if Path(arguments.path).expanduser().exists() else Path(arguments.path).name,
    )
    if arguments.json:
        print_json({"directory": str(out), "model": config.to_dict()["model"], "notes": notes})
        return
    for name in _PRINTED:
        print(f"model.{name:10} {shown(getattr(config.model, name))}")
    for note in notes:
        print(f"note: {note}")
    following = f"txl eval {shlex.quote(str(out))}" + ("" if arguments.corpus else " --corpus my.txt")
    if not (out / "vocabulary.json").exists():
        following = "the same command with --vocabulary FILE and another --out"
    print(f"imported into {out}; next: {following}")
