"""What a run is made of, said to the user and recorded in its log before the first step."""

from __future__ import annotations

import sys
import uuid

from txl.training.environment import describe_hardware, describe_software
from txl.training.estimate import parameters_by_part, softmax_hint
from txl.training.loop import TrainingLoop


def announce(
    loop: TrainingLoop, event: str, *, compiled: bool, init_from: str | None, init_note: str | None = None
) -> None:
    """Say and record what runs here, if this is the process that talks.

    Args:
        loop: about to train.
        event: "start" or "resume".
        compiled: whether its layers are.
        init_from: the directory that the weights came from, if they did.
        init_note: what of the two models' weights was not taken over, if anything.

    Raises:
        UserError: if the log cannot be written.
    """
    processes, directory, run = loop.trained.processes, loop.directory, loop.run
    if not processes.is_first:
        return
    parameters = parameters_by_part(loop.model)
    total = sum(parameters.values())
    directory.append(
        event,
        loop.progress.step,
        config=run.to_dict(),
        corpus=loop.corpus.info(),
        parameters=parameters,
        total_parameters=total,
        attention=loop.model.attention_name,
        compiled=compiled,
        hardware=describe_hardware(loop.device),
        software=describe_software(),
        command=sys.argv,
        init_from=init_from,
        init_note=init_note,
        processes=processes.count,
        run=directory.run_id() or uuid.uuid4().hex,
    )
    if event == "resume":
        start = f", going on from step {loop.progress.step}"
    else:
        note = "" if init_note is None else f" ({init_note})"
        start = "" if init_from is None else f", starting from {init_from}{note}"
    if run.train.warmup_steps >= run.train.steps:
        loop.display.message(f"note: the warm-up of {run.train.warmup_steps} steps is not over when training ends")
    attention = loop.model.attention_name + (" attention, compiled layers" if compiled else " attention")
    count, engine = processes.count, run.train.parallel.upper()
    together = f" in {count} processes ({engine})" if count > 1 else ""
    loop.display.message(
        f"{run.name}: {total:,} parameters, {loop.corpus.name} in {loop.corpus.unit} tokens, "
        f"{attention} on {loop.device}{together}{start}"
    )
    for note in loop.corpus.notes("test") if event == "start" and "test" in loop.corpus.splits else ():
        loop.display.message(f"note: {note}")
    hint = softmax_hint(run, len(loop.corpus.vocabulary), parameters, loop.device) if event == "start" else None
    if hint is not None:
        loop.display.message(f"note: {hint}")
