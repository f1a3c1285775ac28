"""`txl import PATH` converts a checkpoint of an earlier implementation into a run; `txl export DIR` writes a model."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

from txl.commands.options import add_config_options, add_out, check_corpus, config_options, run_to_read, shared
from txl.commands.output import print_json
from txl.commands.parser import Parser, option
from txl.config import DataConfig, parsed_options, shown
from txl.files import check_new_directory

# Fields of the model that a file may fail to state, since shapes of tensors do not tell them, and the two rates of
# dropout that training continues with. All others follow from the file.
_NOT_IN_SHAPES = (
    *("model.mem_len", "model.window", "model.clamp_len", "model.pre_norm", "model.layer_norm_eps", "model.cutoffs"),
    *("model.div_val", "model.dropout", "model.dropatt"),
)
# Fields of the model that are printed; config.json has them all.
_PRINTED = ("n_layer", "d_model", "n_head", "d_head", "d_inner", "cutoffs", "div_val", "mem_len", "window", "clamp_len")


def add_parser(commands: Parser) -> None:
    """Add both commands to the command line."""
    parser = commands.add_command(
        "import",
        help="read a checkpoint of an earlier implementation",
        example="txl import model.pt --vocabulary vocab.txt --out runs/imported",
        description="Read a checkpoint of an earlier implementation and write it as a run: the authors' model.pt or "
        "TensorFlow checkpoint, a directory of Hugging Face's or a model's name on its Hub, or NVIDIA's checkpoint. No "
        "code in the files is executed.",
        add_help=False,
    )
    option(parser, "path", "PATH", "a file, a directory, or a model's name on the Hugging Face Hub")
    add_out(parser, "DIR", "the run directory to write", required=True)
    files = "vocab.pkl, vocab.bin, cache.pt, cache.pkl, vocab.txt (one symbol a line), or vocabulary.json of a run"
    option(parser, "--vocabulary", "FILE", files)
    parser.add_argument("--corpus", metavar="NAME", default="", help="corpus that txl eval reads by default")
    add_config_options(parser, ("model",), "transformer-xl", fields=_NOT_IN_SHAPES)
    shared(parser, "json")
    parser.set_defaults(run=run_import)

    parser = commands.add_command(
        "export",
        help="write a model for other programs",
        example="txl export runs/mine --out exported",
        description="Write a run's model as a directory that transformers opens (AutoModelForCausalLM, AutoTokenizer), "
        "or as plain safetensors.",
    )
    shared(parser, "directory")
    add_out(parser, "DIR", "the directory to write", required=True)
    option(parser, "--format", "NAME", "huggingface or safetensors", default="huggingface")
    shared(parser, "checkpoint", "json")
    parser.set_defaults(run=run_export)


def run_import(arguments: argparse.Namespace) -> None:
    """Import the checkpoint, and print the recovered configuration."""
    stated, out = parsed_options(config_options(arguments)), Path(arguments.out)
    check_corpus(arguments.corpus)
    check_new_directory(out)
    from txl.data.corpora import with_absolute_paths
    from txl.interop.import_run import checkpoint_path, import_run
    from txl.interop.vocabulary_files import read_vocabulary

    path = checkpoint_path(arguments.path, quiet=arguments.json)
    vocabulary = None if arguments.vocabulary is None else read_vocabulary(Path(arguments.vocabulary))
    if vocabulary is not None:
        vocabulary.seen = None  # the weights may have been trained on another text than the vocabulary's run
    config, notes = import_run(
        path,
        out,
        vocabulary=vocabulary,
        model_options={name.removeprefix("model."): value for name, value in stated.items()},
        data=with_absolute_paths(DataConfig(corpus=arguments.corpus)),
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


def run_export(arguments: argparse.Namespace) -> None:
    """Export the model, and print how to open it."""
    directory, _, _ = run_to_read(arguments)
    from txl.interop.export_run import export_run

    out = Path(arguments.out)
    notes = export_run(directory.path, out, arguments.format, arguments.checkpoint)
    if arguments.json:
        print_json({"directory": str(out), "format": arguments.format, "notes": notes})
        return
    for note in notes:
        print(f"note: {note}")
    opened = f"; next: import txl.huggingface; AutoModelForCausalLM.from_pretrained({str(out)!r})"
    print(f"exported into {out}{opened if arguments.format == 'huggingface' else ''}")
