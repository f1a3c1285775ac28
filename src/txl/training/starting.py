"""The start of training: a new or resumed run in a directory, and initial weights from another run."""

from __future__ import annotations

import errno
import os
import re
import shutil
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from txl.config import RunConfig, TransformerXLConfig, differences, may_change, with_unset_data
from txl.data.corpora import Corpus, is_named
from txl.errors import Field, UserError
from txl.files import absolute, check_utf8, reason_of, refuse_file
from txl.runs.checkpoints import MODEL_FILE, VerifiedCheckpoint, checkpoint_name
from txl.runs.directory import RunDirectory, load_weights
from txl.training.schedule import learning_rate

if TYPE_CHECKING:  # a directory is checked without PyTorch, which takes seconds to import
    from txl.models.language_model import LanguageModel
    from txl.training.state import TrainingState

# Files that a start may leave behind if it failed before config.json was written, and those it was writing.
_BEGUN = frozenset({"vocabulary.json", "log.jsonl", "checkpoints", "latest", "tensorboard", "not-finite.json"})
_BEGUN_PARTIAL = re.compile(r"(vocabulary\.json|config\.json|latest|not-finite\.json)\.[0-9a-f-]+\.partial")
_AUXILIARY = "auxiliary."  # prefix of the weights that only auxiliary losses need (`txl.models.vanilla`)


def make_directory(path: Path) -> list[Path]:
    """Create a directory with its parents, and return the folders that were missing, innermost first."""
    check_utf8(path)
    refuse_file(path, "out")
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    try:
        path.mkdir(parents=True, exist_ok=True)
        if not os.access(path, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, "not writable")
    except OSError as error:
        remove_empty(missing)
        remedy = "give a directory that can be written"
        raise UserError(reason_of(error), field="out", value=path, remedy=remedy) from None
    return missing


def remove_empty(folders: list[Path]) -> None:
    """Remove folders, innermost first, that hold nothing; another run may have begun beside them."""
    with suppress(OSError):
        for folder in folders:
            folder.rmdir()


def begins_here(
    directory: RunDirectory, run: RunConfig, extend: bool = False, init_from: str | Path | None = None
) -> bool:
    """Return True if a new run begins in a locked directory, False if the stored run continues.

    If a new run begins, the files of a failed start are removed; `refuse_foreign` has looked for files of others.
    """
    path = directory.path
    if not directory.config_path.exists():
        if extend:
            but = f"{path} holds no run to continue"
            raise UserError(field="extend", value=True, but=but, remedy="leave it out to start one")
        remove_begun(path)
        return True
    if has_checkpoint(directory):
        refuse_other_run(directory, run, extend)
        started = directory.log().started
        if init_from is not None and started is not None:
            first = started["init_from"]
            if first is None or first != absolute(str(init_from)):
                problem = f"the run in {path} began with {first or 'random weights'} and continues with its own weights"
                remedy = ("leave it out, or give another ", Field("out"))
                raise UserError(problem, field="init_from", value=init_from, remedy=remedy)
        return False
    # A run without a checkpoint (its first steps failed, say) is replaced by another one. A run that starts from
    # given weights saves these as its first checkpoint.
    there_now = directory.config()
    if init_from is not None:
        RunDirectory(init_from).config()  # raises an error before anything is removed
    elif not differences(there_now, with_unset_data(run, there_now), ignore=may_differ(run)):
        return False
    directory.config_path.unlink()
    remove_begun(path)
    return True


def refuse_foreign(directory: RunDirectory) -> bool:
    """Refuse a directory without a run that has files which no trainer has written; return whether one has used it."""
    was_ours = (directory.path / ".lock").exists()
    for path in sorted(directory.path.iterdir()) if not directory.config_path.exists() else ():
        if path.name != ".lock" and not (was_ours and _is_of_a_begun_run(path)):
            problem = f"not empty and not a run directory (it contains {path.name})"
            raise UserError(problem, field="out", value=directory.path, remedy="give another directory")
    return was_ours


def check_out(path: Path, run: RunConfig | None = None, extend: bool = False) -> None:
    """Refuse a directory that cannot be written, or has files of others or another run than `run`; make nothing."""
    directory, missing = RunDirectory(path), make_directory(path)
    try:
        refuse_foreign(directory)
    finally:
        remove_empty(missing)
    if run is not None and directory.config_path.exists() and has_checkpoint(directory):
        refuse_other_run(directory, run, extend)


def has_checkpoint(directory: RunDirectory) -> bool:
    """Return whether a run has written a checkpoint, including one that was later refused."""
    folder = directory.checkpoints
    return folder.is_dir() and any(not path.name.startswith(".") for path in folder.iterdir())


def as_begun(run: RunConfig, directory: RunDirectory) -> RunConfig:
    """Return a preset's configuration with what `txl.training.defaults` may have chosen, as in the run of a directory.

    It is returned unchanged if the directory holds no checkpoint, or a run that did not begin on a GPU.
    """
    started = directory.log().started if directory.config_path.exists() and has_checkpoint(directory) else None
    if started is None or not started["hardware"]["device"].startswith("cuda"):
        return run
    begun = directory.config()
    train, model = replace(run.train, dtype=begun.train.dtype, capture=begun.train.capture), run.model
    if isinstance(model, TransformerXLConfig) and isinstance(begun.model, TransformerXLConfig):
        model = replace(model, attention=begun.model.attention)
    return replace(run, train=train, model=model)


def refuse_other_run(directory: RunDirectory, run: RunConfig, extend: bool = False) -> None:
    """Refuse a directory that holds a run of another configuration, naming the fields that differ."""
    path, there_now = directory.path, directory.config()
    run = with_unset_data(run, there_now)
    changed = changed_fields(there_now, run, extend)
    if not changed:
        return
    before, now = there_now.train.steps, run.train.steps
    if extend and now < before:
        raise UserError(
            field="train.steps", value=now, but=f"the run in {path} has {before}", expected="more to extend it"
        )
    remedy = start_from(path)
    if weight_changes(directory, run) or there_now.data.unit != run.data.unit:
        remedy = ("give another ", Field("out"), ", or go on with this run by giving ", Field("out", path), " alone")
    if not extend and not changed_fields(there_now, run, extend=True):
        remedy = ("add ", Field("extend"), " to train this one longer, or ", *remedy)
    raise UserError(f"holds a different run: {', '.join(changed)}", field="out", value=path, remedy=remedy)


def start_from(path: Path) -> tuple[str | Field, ...]:
    """Return the advice to train on from the weights of a run that itself cannot go on."""
    weights = (", with ", Field("init_from", path), " to start from its weights, or ", Field("fork"))
    return ("give another ", Field("out"), *weights, " to do so beside it")


def imported(path: Path) -> UserError:
    """Return the error for an imported model that is to be trained on."""
    remedy = ("give another ", Field("out"), ", with ", Field("init_from", path), " to start from its weights")
    return UserError(f"{path} is an imported model, which has no training to continue", remedy=remedy)


def changed_fields(before: RunConfig, run: RunConfig, extend: bool = False) -> list[str]:
    """Return the changed fields that make the configuration one of another run, as "train.batch_size 4 -> 8".

    A text of the user is identified by its hash, which is compared after the corpus is opened, not by its path.
    """
    ignore = set(may_differ(run)) | {"data.source"}
    if not is_named(before.data.corpus) and not is_named(run.data.corpus):
        ignore.add("data.corpus")
    if extend and run.train.steps > before.train.steps:
        ignore.add("train.steps")
    return differences(before, run, frozenset(ignore))


def extension_changes(before: RunConfig, run: RunConfig, state: TrainingState) -> list[str]:
    """Return the differences, often none, of a run extended in this state from one that had all steps at first."""
    changes = []
    old, new, step, losses = before.train, run.train, state.counters.step, state.counters.validation_losses
    # Two cosines or lines stay apart once they fall, so if the last rates are equal, all earlier ones were.
    if step > 0 and learning_rate(step - 1, old) != learning_rate(step - 1, new):
        factor = new.average_lr_factor if state.average else 1.0
        rates = [f"{factor * learning_rate(step, train, losses):.3g}" for train in (old, new)]
        shape = "line" if new.schedule == "linear" else new.schedule
        changes.append(
            f"the learning rate follows the {shape} to step {new.steps} from here ({rates[1]}, it would be {rates[0]})"
        )
    if run.model.loss_depends_on_progress and step > 0:
        changes.append(f"the layers' losses end as in {new.steps} steps from here")
    if new.on_spike == "rollback" and step == old.steps and step % new.checkpoint_every:
        changes.append(f"a spike before the next due checkpoint goes back to step {step}")
    return changes


def may_differ(run: RunConfig) -> frozenset[str]:
    """Return the fields that a continued run may change."""
    fixed = set()
    if run.train.follows_validation:
        fixed |= {"train.eval_every"}
    if run.train.on_spike == "rollback":  # the run goes back to scheduled checkpoints
        fixed |= {"train.checkpoint_every"}
    return may_change() - fixed


def remove_begun(path: Path) -> None:
    """Remove the files of a failed start, except for the lock."""
    for left in path.iterdir():
        if _is_of_a_begun_run(left):
            if left.is_dir() and not left.is_symlink():
                shutil.rmtree(left, ignore_errors=True)
            else:
                left.unlink(missing_ok=True)


def _is_of_a_begun_run(path: Path) -> bool:
    """Return whether a file may come from a start that failed before config.json was written."""
    if path.name == "checkpoints":
        return {left.name for left in path.iterdir() if not left.name.startswith(".")} <= {checkpoint_name(0)}
    return path.name in _BEGUN or _BEGUN_PARTIAL.fullmatch(path.name) is not None


def weight_changes(source: RunDirectory, run: RunConfig) -> list[str]:
    """Return the settings that would give a run's weights another meaning, as "model.n_layer 1 -> 4"."""
    theirs, ours = source.config().model.weight_settings(), run.model.weight_settings()
    return [
        f"model.{name} {theirs[name]} -> {value}"
        for name, value in ours.items()
        if name in theirs and theirs[name] != value
    ]


def check_same_model(source: RunDirectory, run: RunConfig, fork: bool = False) -> None:
    """Refuse weights that would have another meaning in this configuration."""
    if changed := weight_changes(source, run):
        problem, field = f"its weights are of another model: {', '.join(changed)}", "fork" if fork else "init_from"
        remedy = ("set these fields to the weights' values, or give another ", Field("out"))
        raise UserError(problem, field=field, value=source.path, remedy=remedy)


def load_initial_weights(source: RunDirectory, model: LanguageModel, corpus: Corpus) -> str | None:
    """Load the weights of another run's best checkpoint, or of its latest if there is no best, into a new model.

    Classifiers of auxiliary losses are used only in training. Those that `model` lacks are left out, those that the
    checkpoint lacks keep their initial weights; both are returned in words, or None.
    """
    weights = VerifiedCheckpoint(source.checkpoint()).tensors(MODEL_FILE)
    size = len(weights.get("softmax.bias", ()))
    if size != model.vocab_size:
        problem = f"its model has {size} tokens, {corpus.name} in {corpus.unit} tokens has {model.vocab_size}"
        raise UserError(problem, field="init_from", value=source.path, expected="the same")
    ours = {name: tensor for name, tensor in model.state_dict().items() if name.startswith(_AUXILIARY)}
    theirs = {name for name in weights if name.startswith(_AUXILIARY)}
    left_out, fresh = theirs - ours.keys(), ours.keys() - theirs
    weights = {name: tensor for name, tensor in weights.items() if name not in left_out}
    load_weights(model, weights | {name: ours[name] for name in fresh}, str(source.path))
    notes = []
    for names, fate in ((left_out, "left out"), (fresh, "newly initialised")):
        if count := len({name.rpartition(".")[0] for name in names}):
            notes.append(f"classifiers of auxiliary losses {fate}: {count}")
    return ", ".join(notes) or None
