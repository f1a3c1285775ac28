"""Settings that are fast on a device, where the user leaves them open: number format, recorded steps, attention."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from txl import devices
from txl.attention import attention_backend, untimed_rival
from txl.config import RecurrentConfig, RunConfig, TransformerXLConfig, with_options
from txl.errors import is_out_of_memory
from txl.processes import process_count
from txl.runs.environment import multiplies_bfloat16
from txl.training.compilation import can_capture
from txl.training.timing import median_seconds, training_workload

# A step's time in seconds beyond which it is timed once, without a graph, and beyond which only one backend is timed:
# all of it then ends within ten seconds.
_LONG, _TOO_LONG = 0.5, 1.5
_MARGIN = 0.9  # another backend than the usual one must need less of its time, so that two starts choose alike
# The values without a choice, and what they give.
_SLOW = {"train.dtype": ("float32", "float32"), "train.capture": ("false", "eager steps")}
# Function that returns the seconds of a training step of a configuration.
Measure = Callable[[RunConfig], float]


@dataclass(frozen=True)
class ChosenAttention:
    """The attention of a run on a GPU: the backend, and the times of a step if they decided."""

    name: str
    timed: str = ""  # in words; empty if the configuration names the backend, or a recorded measurement does


def fast_dtype(device: str) -> str:
    """Return the number format in which a device trains fastest."""
    if multiplies_bfloat16(device):
        return "bfloat16"
    kind = devices.compute_capability(device)
    return "float16" if kind is not None and kind >= (7, 0) else "float32"  # matrix instructions since the V100


def fast_options(run: RunConfig, given: dict[str, str], device: str) -> dict[str, str]:
    """Return options that make training fast on a device, by dotted name: `train.dtype` and `train.capture`.

    An option of the user's stays, and so does float32 where it was asked for TF32. A recurrent model stays in float32
    on a GPU, where nobody timed it in another format.

    Args:
        run: configuration of a preset, with or without the options of the user.
        given: options of the user by dotted name.
        device: device that the run trains on.
    """
    options: dict[str, str] = {}
    asked, dtype = with_options(run, given), fast_dtype(device)
    is_open = "train.dtype" not in given and asked.train.dtype == "float32" and not asked.train.tf32
    is_open &= not (dtype == "float16" and asked.train.parallel == "fsdp" and process_count() > 1)  # refused
    if is_open and dtype != "float32" and (device == "cpu" or not isinstance(asked.model, RecurrentConfig)):
        options["train.dtype"] = dtype
    # Several processes cannot record their steps.
    is_open = "train.capture" not in given and not asked.train.capture
    if is_open and process_count() == 1 and can_capture(asked, device):
        options["train.capture"] = "true"
    return options


def chosen_attention(run: RunConfig, device: str, measure: Measure | None) -> ChosenAttention | None:
    """Return the attention that a run trains with on a GPU; None for a model without a choice.

    If the configuration leaves it open and no GPU of this compute capability was measured, `measure` times the usual
    backend and its rival, which must be faster by a tenth. Without `measure` the usual one stays.
    """
    if not isinstance(run.model, TransformerXLConfig):
        return None
    dtype = getattr(torch, run.train.dtype)
    usual = attention_backend(run.model, device, dtype).name
    rival = untimed_rival(run.model, device, dtype)
    if rival is None or measure is None:
        return ChosenAttention(usual)
    seconds = _seconds(run, usual, measure)
    if _TOO_LONG < seconds < math.inf:
        return ChosenAttention(usual, f"a step takes {seconds:.2g} s with it, and none with {rival} was timed")
    try:
        others = _seconds(run, rival, measure)
    except Exception as error:  # a kernel's compiler has exceptions of its own, and nobody ran it on such a GPU
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        return ChosenAttention(usual, f"{rival} fails: {reason}")
    chosen, times = (rival if others < _MARGIN * seconds else usual), {usual: seconds, rival: others}
    words = {
        name: "needs too much memory" if time == math.inf else f"{1e3 * time:.3g} ms" for name, time in times.items()
    }
    return ChosenAttention(chosen, f"timed a step: {usual} {words[usual]}, {rival} {words[rival]}")


def note(changes: dict[str, str], attention: ChosenAttention | None, device: str) -> str:
    """Return a line about the choice, with the options that undo it; empty if nothing was chosen.

    Args:
        changes: the result of `fast_options`.
        attention: the attention of the run; None: it has no choice.
        device: the GPU.
    """
    chosen = [f"{name} {value}" for name, value in changes.items()]
    if attention is not None and (changes or attention.timed):
        chosen.append(f"attention {attention.name}" + (f" ({attention.timed})" if attention.timed else ""))
    if not chosen:
        return ""
    kind = devices.compute_capability(device)
    gpu = "this GPU" if kind is None else f"a GPU of compute capability {kind[0]}.{kind[1]}"
    undone = [(name, *_SLOW[name]) for name in changes]
    others = " ".join(f"--{name} {value}" for name, value, _ in undone)
    meaning = " and ".join(words for _, _, words in undone)
    return f"fast on {gpu}: {', '.join(chosen)}" + (f"; {others} gives {meaning} back" if undone else "")


def step_seconds(run: RunConfig, vocab_size: int, device: str) -> float:
    """Return the time of a training step of a configuration in seconds; steps that take long are timed only once."""
    _, step = training_workload(run, vocab_size, device, must_compile=False, longest=_LONG)
    return median_seconds(step, device, _LONG)


def _seconds(run: RunConfig, attention: str, measure: Measure) -> float:
    """Return the seconds of a step with an attention backend; infinity if it needs too much memory."""
    try:
        return measure(with_options(run, {"model.attention": attention}))
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return math.inf
    finally:
        if torch.cuda.is_initialized():
            gc.collect()  # a recorded step holds memory until then
            torch.cuda.empty_cache()
