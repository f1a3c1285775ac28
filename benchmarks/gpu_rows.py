"""Rows of `benchmarks.gpu`: independent functions that measure from a few plain values, and return figures for JSON.

`--rehearse` measures the same rows with tiny models on a CPU, where each replay of a graph executes the steps again.

Shapes: B lanes, T tokens of a segment, M positions of memory, S = M + T keys, H heads, D width of a head.
"""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from benchmarks.gpu_profile import kernels_of, table_of
from torch import Tensor

import txl
from txl.attention import KeyScope, Operands
from txl.config import RunConfig, TransformerXLConfig
from txl.data.user_text import stdlib_files
from txl.devices import Captured, sent
from txl.errors import UserError
from txl.evaluation import recorded
from txl.generation.steps import StaticStep
from txl.minutes.measured import run_in_minutes
from txl.models import build_model
from txl.models.family import FamilyModel
from txl.models.transformer_xl import TransformerXL, TransformerXLLayer
from txl.runs.directory import RunDirectory
from txl.training import compilation, loop, trainer
from txl.training.compilation import WARM, CapturedStep, compile_layers
from txl.training.optimisers import build_optimizer
from txl.training.step import StepInputs, training_step
from txl.training.timing import synchronize
from txl_lab.speed import transformer_xl_of
from txl_lab.speed.budget import peak_bytes, ranked_tokens
from txl_lab.speed.operations import bytes_read_once, matmul_rate, read_bandwidth, training_operations
from txl_lab.speed.table9 import slowdown

Figures = dict[str, Any]
VOCABULARY = {"enwik8-12L": 204, "enwik8-24L": 204, "wt103-base": 267_735, "stdlib-bpe": 2048, "ptb": 10_000}
NO_DROPOUT = {"dropout": 0.0, "dropatt": 0.0, "dropout_r": 0.0}


@dataclass(frozen=True)
class Bench:
    """Device on which rows are measured, and size of the measurements."""

    device: str
    rehearsed: bool = False
    kept: dict[str, Any] = field(default_factory=dict)  # measured values and the last model, for the next row

    @property
    def steps(self) -> int:
        """Number of timed steps."""
        return 2 if self.rehearsed else 20

    def run(self, preset: str, **train: Any) -> RunConfig:
        """Return a preset without dropout; in the rehearsal with a tiny model."""
        run = txl.preset(preset)
        shape = dataclasses.replace(transformer_xl_of(run), **NO_DROPOUT)
        if self.rehearsed:
            tiny = {"n_layer": 2, "d_model": 32, "n_head": 2, "d_head": 16, "d_inner": 48, "mem_len": 16}
            cutoffs = (20, 60) if shape.cutoffs else ()
            shape = dataclasses.replace(shape, **tiny, d_embed=None, cutoffs=cutoffs)
            train = {"segment": 16, "batch_size": 2} | train
        run.model = shape
        run.train = dataclasses.replace(run.train, **({"dtype": "bfloat16", "micro_batches": 1} | train))
        return run

    def attention(self, name: Any, mode: str = "eager") -> Any:
        """Return the attention to measure; the rehearsal substitutes `shifted` for `triton`, which needs a GPU."""
        if not self.rehearsed or name != "triton":
            return name
        if "compiled" in mode:
            raise UserError(f"not rehearsed: {name} needs a GPU, and shifted's layers are compiled in another row")
        return "shifted"

    def vocabulary(self, preset: str) -> int:
        """Return the number of tokens in a preset's vocabulary."""
        return 100 if self.rehearsed else VOCABULARY[preset]

    def rate(self) -> float:
        """Return the measured dense bfloat16 rate in operations per second."""
        if "rate" not in self.kept:
            given = (128, 0.05) if self.rehearsed else (8192, 0.2)
            self.kept["rate"] = matmul_rate(torch.bfloat16, self.device, *given)
        return self.kept["rate"]

    def bandwidth(self) -> float:
        """Return the measured bandwidth in bytes per second."""
        if "bandwidth" not in self.kept:
            self.kept["bandwidth"] = read_bandwidth(self.device, 2**20 if self.rehearsed else None)
        return self.kept["bandwidth"]


def imitate_recording() -> None:
    """Replace, in this process, what a CPU refuses of recorded steps, and what is only worthwhile on a GPU.

    A replay runs the step again, into the same tensors.
    """

    def as_if_recorded(self: Captured) -> Callable[[], None]:
        def replay() -> None:
            new = self._function(*self.inputs)
            self.outputs = self.outputs or tuple(part.clone() for part in new)
            for kept, part in zip(self.outputs, new, strict=True):
                kept.copy_(part)

        return replay

    Captured._record = as_if_recorded  # pyright: ignore[reportAttributeAccessIssue]
    compilation.check_capture = lambda run, device: None
    loop.reads_later = lambda setup, state: True
    recorded.records = lambda model: type(model) is TransformerXL
    recorded.records_windows = lambda model: True


def seconds_each(step: Callable[[], Any], steps: int, device: str) -> float:
    """Return the mean seconds of steps that are launched one after the other without waiting, as in a program."""
    synchronize(device)
    began = time.perf_counter()
    for _ in range(steps):
        step()
    synchronize(device)
    return (time.perf_counter() - began) / steps


def tests(bench: Bench) -> Figures:
    """Run the tests marked `gpu`, which compare every backend and every path with the oracle."""
    root = Path(__file__).parent.parent
    files = [path for path in (root / "tests").rglob("test_*.py") if "mark.gpu" in path.read_text(encoding="utf-8")]
    paths = [str(root / "src"), str(root), *filter(None, [os.environ.get("PYTHONPATH")])]
    # Most of the time goes into compiling kernels, so several processes share the GPU.
    processes = [] if bench.rehearsed else ["-n", str(max(1, min(10, (os.cpu_count() or 1) // 2)))]
    options = ["-q", "-m", "gpu", "-p", "no:cacheprovider", "--tb=short", "--show-capture=no"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *processes, *options, *sorted(map(str, files))],
        cwd=root,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        check=False,
    )
    counts = {what: int(n) for n, what in re.findall(r"(\d+) (passed|failed|skipped|error)", done.stdout[-2000:])}
    if done.returncode not in (0, 1) or not counts:
        raise RuntimeError(f"pytest ended with {done.returncode}: {(done.stdout + done.stderr)[-1500:]}")
    failures = re.findall(r"^(?:FAILED|ERROR) (.*)$", done.stdout, re.MULTILINE)
    return {**counts, "failures": failures, "output": done.stdout[-6000:] if failures else ""}


def operations(model: FamilyModel, targets: Tensor, segment: int, memory: int) -> int:
    """Count the operations of a training step by `training_operations`, an adaptive softmax included."""
    shape = model.config
    assert isinstance(shape, TransformerXLConfig)
    lanes, rows = len(targets), targets.numel()
    plain = dataclasses.replace(shape, cutoffs=(), d_embed=None, div_val=1)
    layers = training_operations(plain, 0, lanes, segment, memory, shape.window)
    tails = model.tail_rows(targets, "full") or ()
    softmax = 0
    for cluster, (first, end) in enumerate(model.softmax.bounds):
        width = (shape.d_embed or shape.d_model) // shape.div_val**cluster
        size = end - first + (len(tails) if cluster == 0 else 0)
        projected = shape.d_model if model.embedding.projection(cluster) is not None else 0
        softmax += 2 * (rows if cluster == 0 else tails[cluster - 1]) * width * (projected + size)
    return layers + 3 * softmax


class TrainingCase:
    """A model that trains on made-up tokens with full memory."""

    def __init__(self, bench: Bench, run: RunConfig, vocab_size: int, compiled: bool = False, captured: bool = False):
        torch.manual_seed(0)
        run.train = dataclasses.replace(run.train, capture=captured)
        self.run, device = run, bench.device
        self.model = build_model(run.model, vocab_size, device).to(device).train()
        if compiled and (reason := compile_layers(self.model, device)) is not None:
            raise UserError(f"nothing is compiled here: {reason}")
        self.optimizer = build_optimizer(self.model, run.train)
        self.text = ranked_tokens(vocab_size, run.train.batch_size, run.train.segment)
        self._tokens, self._rows = sent(self.text, device), [self.model.tail_rows(self.text, "full")]
        self._states = [self.model.init_state(run.train.batch_size).filled_with_noise()]
        self._step = CapturedStep() if captured else training_step
        self.is_warm = False

    def step(self) -> None:
        """Make one update, without waiting for the device."""
        inputs = StepInputs(self._tokens, self._tokens, self._states, tail_rows=self._rows)
        self._made = self._step(self.model, self.optimizer, inputs, self.run.train)
        self._states = self._made.states

    def warm(self) -> None:
        """Make enough steps to compile and record everything."""
        if not self.is_warm:
            for _ in range(WARM + 2):
                self.step()
        self.is_warm = True

    def time(self, bench: Bench) -> Figures:
        """Time steps, after the warm-up: up to the number of the bench, as many as fit into two seconds."""
        self.warm()
        cuda = bench.device.startswith("cuda")
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        first = seconds_each(self.step, 1, bench.device)
        seconds = seconds_each(self.step, max(3, min(bench.steps, int(2 / first))), bench.device)
        train = self.run.train
        count = operations(self.model, self.text, train.segment, transformer_xl_of(self.run).lengths().capacity)
        result = self._made.result()
        if not result.updated:
            raise RuntimeError(f"the loss is {result.loss}, the gradient's norm {result.grad_norm}")
        return {
            "batch_size": train.batch_size,
            "segment": train.segment,
            "step_seconds": seconds,
            "tokens_per_second": train.batch_size * train.segment / seconds,
            "operations_per_second": count / seconds,
            "loss": result.loss,
            # The allocator does not count what a recorded step keeps.
            "peak_bytes": torch.cuda.max_memory_allocated() if cuda and not train.capture else None,
        }


def case_of(
    bench: Bench, preset: str, attention: Any, mode: str, dropout: bool = False, dtype: str = "bfloat16"
) -> TrainingCase:
    """Return the model of a preset in training; the last one is kept for the next row."""
    key = ("case", preset, attention, mode, dropout, dtype)
    if bench.kept.get("key") != key:
        bench.kept.pop("case", None)
        if bench.device.startswith("cuda"):
            torch.cuda.empty_cache()
        run = bench.run(preset, dtype=dtype)
        if dropout:
            own = transformer_xl_of(txl.preset(preset))
            run.model = dataclasses.replace(run.model, **{name: getattr(own, name) for name in NO_DROPOUT})
        run.model = dataclasses.replace(run.model, attention=bench.attention(attention, mode))
        bench.kept["case"] = TrainingCase(bench, run, bench.vocabulary(preset), "compiled" in mode, "captured" in mode)
        bench.kept["key"] = key
    return bench.kept["case"]


def training(bench: Bench, preset: str, attention: Any, mode: str, **more: Any) -> Figures:
    """Time training steps of a preset with a backend: eager, compiled, captured, or compiled and captured."""
    figures, rate = case_of(bench, preset, attention, mode, **more).time(bench), bench.rate()
    return figures | {"bfloat16_rate": rate, "fraction_of_rate": figures["operations_per_second"] / rate}


def kernels(bench: Bench, preset: str, attention: Any, mode: str, **more: Any) -> Figures:
    """Profile a training step: launches and time by class and by kernel."""
    case = case_of(bench, preset, attention, mode, **more)
    case.warm()
    return table_of(kernels_of(case.step, bench.device))


def warm(bench: Bench, preset: str, attention: Any, batch_size: int, **more: Any) -> Figures:
    """Make one eager step, so that the kernels that it compiles are on disk for the rows that time them."""
    run = bench.run(preset, dtype=more.get("dtype", "bfloat16"), batch_size=batch_size)
    model = transformer_xl_of(txl.preset(preset)) if more.get("dropout") and not bench.rehearsed else run.model
    run.model = dataclasses.replace(model, n_layer=2, attention=bench.attention(attention))  # all layers are alike
    began = time.perf_counter()
    case = TrainingCase(bench, run, bench.vocabulary(preset))
    case.step()
    synchronize(bench.device)
    return {"step_seconds": time.perf_counter() - began}


class WatchedLoop(trainer.TrainingLoop):
    """A training loop that tells after each step."""

    def watch(self, step: int) -> None:
        raise NotImplementedError

    def _evaluate_and_save(self, step: int, is_last: bool) -> None:
        super()._evaluate_and_save(step, is_last)
        self.watch(step)


class Enough(Exception):
    """Exception by which a watcher ends training."""


@contextmanager
def watched(watch: Callable[[WatchedLoop, int], None]) -> Iterator[None]:
    """Call a function with the loop and the number of the step after each step of a `Trainer`."""
    kept = trainer.TrainingLoop

    class Watched(WatchedLoop):
        def watch(self, step: int) -> None:
            watch(self, step)

    trainer.TrainingLoop = Watched
    try:
        yield
    finally:
        trainer.TrainingLoop = kept


def ptb(bench: Bench, batch_size: int, attention: Any = "triton") -> Figures:
    """Time and profile steps of `ptb` as training makes them, with dropout, averaged weights, and segments of 70.

    The text is made of random words. Times are of the whole loop, all its work on the host included.
    """
    run = bench.run("ptb", batch_size=batch_size)
    if not bench.rehearsed:
        run.model = txl.preset("ptb").model
    run.model = dataclasses.replace(run.model, attention=bench.attention(attention, "captured"))
    warm, timed = 12, 3 if bench.rehearsed else 40
    change: Figures = {"steps": 10_000, "average_from": 4, "warmup_steps": 1, "eval_every": 0, "checkpoint_every": 0}
    change |= {"capture": True, "random_segments": False, "log_every": 10_000}
    run.train = dataclasses.replace(run.train, **change)
    began, figures, norms = 0.0, Figures(), list[float]()
    profiled: Figures = {}

    def watch(training_loop: WatchedLoop, step: int) -> None:
        nonlocal began, profiled
        if step <= 6:
            training_loop._settle()
            norms.append(training_loop.state.counters.last_norm or float("nan"))
        if step == warm:
            synchronize(bench.device)
            began = time.perf_counter()
        if step == warm + timed:
            synchronize(bench.device)
            seconds = (time.perf_counter() - began) / timed
            figures.update(step_seconds=seconds, tokens_per_second=run.train.tokens_per_step / seconds)
            try:
                profiled = table_of(kernels_of(lambda: training_loop._step(1e-4), bench.device))
            except Exception as error:  # the time is worth keeping
                profiled = {"profile_error": f"{type(error).__name__}: {error}"}
            raise Enough

    with tempfile.TemporaryDirectory() as folder:
        text, words = Path(folder) / "text.txt", bench.vocabulary("ptb") - 2
        # Every word occurs, and no lane ends, after which memory would be empty and steps eager.
        ranks = [*range(words), *ranked_tokens(words, 1, 100 * batch_size * run.train.segment)[0].tolist()]
        lines = [" ".join(f"w{rank}" for rank in ranks[at : at + 20]) for at in range(0, len(ranks), 20)]
        text.write_text("\n".join(lines) + "\n", encoding="utf-8")
        run.data = txl.config.DataConfig(corpus=str(text), unit="word")
        with watched(watch), suppress(Enough):
            trainer.Trainer(
                run, Path(folder) / "run", device=bench.device, data_dir=Path(folder) / "data", quiet=True
            ).fit()
    return figures | {"batch_size": batch_size, "first_norms": norms} | profiled


def authors_attention(operands: Operands, scope: KeyScope, dropout: float = 0.0) -> Tensor:
    """Compute `reference_attention` as Appendix B of the paper describes it, in plain PyTorch: all scores, shifted."""
    query, key, value, position, u, v = operands
    n_query, n_key = query.shape[1], key.shape[1]
    content = torch.einsum("bihd,bjhd->bhij", query + u, key)
    by_distance = torch.einsum("bihd,jhd->bhij", query + v, position)
    lanes, heads = by_distance.shape[:2]
    # Row i is shifted to the left by T-1-i: a column is padded, and the matrix is read with its two sizes swapped.
    shifted = F.pad(by_distance, (1, 0)).view(lanes, heads, n_key + 1, n_query)[:, :, 1:].reshape_as(by_distance)
    scores = (content + shifted) / query.shape[-1] ** 0.5
    scores = scores.masked_fill(~scope.mask(n_query, query.device), float("-inf"))
    weights = F.dropout(scores.float().softmax(dim=-1), dropout).to(value.dtype)
    return torch.einsum("bhij,bjhd->bihd", weights, value)


def equations(bench: Bench, preset: str) -> Figures:
    """Time training steps with the authors' equations in plain PyTorch, compared with our model with equal weights."""
    run = bench.run(preset)
    run.model = dataclasses.replace(run.model, attention="shifted")
    case = TrainingCase(bench, run, bench.vocabulary(preset))
    model = case.model
    assert isinstance(model, TransformerXL)
    with torch.no_grad():
        text = case.text[:1].to(bench.device)
        state = model.init_state(1).filled_with_noise()
        ours, _ = model.log_probs(text, state)
        for layer in model.layers:
            assert isinstance(layer, TransformerXLLayer)
            layer.attention.attend = authors_attention
        theirs, _ = model.log_probs(text, state)
    return case.time(bench) | {"largest_difference": (ours - theirs).abs().max().item()}


def huggingface(bench: Bench, dtype: str) -> Figures:
    """Time training steps of Hugging Face's model, compared with our model with equal weights and equal losses."""
    try:
        from benchmarks import peers
    except ImportError as error:
        raise UserError(f"Hugging Face's model is not here (transformers 4.37.2): {error}") from None
    run = bench.run("enwik8-12L", dtype=dtype)
    train, shape = run.train, transformer_xl_of(run)
    vocab_size, lengths = bench.vocabulary("enwik8-12L"), (train.batch_size, train.segment, shape.mem_len)
    work = peers.Workload("training step", "enwik8-12L", vocab_size, *lengths, (0, 0), training=True)
    peer = peers.peer_of(run, work)
    model = peers.ours_of(peer).to(bench.device).train()
    peer.to(bench.device).train()
    tokens = ranked_tokens(vocab_size, *lengths[:2]).to(bench.device)
    state = model.init_state(lengths[0]).filled_with_noise()
    mems = [each.transpose(0, 1).contiguous() for each in state.hidden]
    with torch.no_grad():
        ours, _ = model.nll(tokens, tokens.roll(-1, 1), state)
        theirs = peer(tokens, mems=mems, labels=tokens).losses
    worst = (ours[:, :-1] - theirs.view(tokens.shape[0], -1)).abs().max().item()
    optimizer = torch.optim.Adam(peer.parameters(), lr=train.learning_rate, fused=True)

    def step() -> None:
        nonlocal mems
        with torch.autocast(torch.device(bench.device).type, torch.bfloat16, enabled=dtype == "bfloat16"):
            out = peer.transformer(tokens, mems=mems)
        peer.crit(out.last_hidden_state.float(), tokens).mean().backward()  # the loss fails under autocast
        torch.nn.utils.clip_grad_norm_(peer.parameters(), train.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        mems = out.mems

    step()
    seconds = seconds_each(step, bench.steps, bench.device)
    per_second = tokens.numel() / seconds
    return {"step_seconds": seconds, "tokens_per_second": per_second, "largest_difference": worst}


def decoding(bench: Bench, streams: int) -> Figures:
    """Time tokens of streams with full memory, compared with the time of reading weights, keys and values once."""
    run, device = bench.run("enwik8-12L"), bench.device
    torch.manual_seed(0)
    memory = 8 if bench.rehearsed else 2100
    model = build_model(run.model, bench.vocabulary("enwik8-12L"), device).to(device).eval()
    assert isinstance(model, TransformerXL)
    settings = {"max_streams": streams, "dtype": torch.bfloat16, "mem_len": memory}
    engine = txl.DecodeEngine(model, **settings, compile=not bench.rehearsed)
    if bench.rehearsed and isinstance(engine._step, StaticStep):
        engine._step.captured = True
    first = engine.join(ranked_tokens(model.vocab_size, 1, memory + 1)[0], seed=0)
    for number in range(1, streams):
        engine.fork(first, seed=number)
    for _ in range(40):  # after this, steps with equal sampling settings are recorded as a whole
        engine.step()
    seconds = seconds_each(engine.step, bench.steps * 5, device)
    shape = engine.model.config
    once = bytes_read_once(engine.model, memory)
    of_a_stream = 2 * shape.n_layer * (memory + 1) * shape.n_head * shape.d_head * 2
    bandwidth = bench.bandwidth()
    bound = (once + (streams - 1) * of_a_stream) / bandwidth
    table = table_of(kernels_of(engine.step, device))
    return {
        "streams": streams,
        "memory": memory,
        "step_seconds": seconds,
        "tokens_per_second": streams / seconds,
        "bandwidth": bandwidth,
        "fraction_of_bandwidth": bound / seconds,
        **table,
    }


def table9(bench: Bench, length: int, lanes: int = 1, segment: int = 128) -> Figures:
    """Time a vanilla Transformer's windows beside Transformer-XL's segments, both recorded."""
    run = bench.run("enwik8-12L")
    given = (32, 8, 1) if bench.rehearsed else (length, segment, 5)
    vocab_size = bench.vocabulary("enwik8-12L")
    return slowdown(transformer_xl_of(run), vocab_size, *given, bench.device, "bfloat16", lanes).to_dict()


def memory(bench: Bench, attention: Any, length: int) -> Figures:
    """Measure the peak memory of a training step at T = M, with four lanes."""
    run = bench.run("enwik8-12L", batch_size=4, segment=min(length, 16) if bench.rehearsed else length)
    run.model = dataclasses.replace(run.model, attention=bench.attention(attention), mem_len=run.train.segment)
    return {"length": run.train.segment, "peak_bytes": peak_bytes(run, bench.vocabulary("enwik8-12L"), bench.device)}


def in_minutes(bench: Bench, minutes: float) -> Figures:
    """Train as `txl train --minutes` does, on sources of the standard library."""
    if bench.rehearsed:
        minutes = 0.2
    with tempfile.TemporaryDirectory() as folder:
        text, data, out = (Path(folder) / name for name in ("text.txt", "data", "run"))
        size = 60_000 if bench.rehearsed else 5_000_000
        sources = b"".join(file.read_bytes() for file in stdlib_files())[:size]
        text.write_bytes(sources.decode("utf-8", "ignore").encode())
        began = time.perf_counter()
        chosen = run_in_minutes(minutes, {"data.corpus": str(text)}, bench.device, data, began=began, quiet=True)
        planned = time.perf_counter() - began
        trainer.Trainer(chosen.run, out, device=bench.device, data_dir=data, quiet=True).fit()
        seconds = time.perf_counter() - began
        last = [each for each in RunDirectory(out).events() if each["event"] == "valid"][-1]
    train = chosen.run.train
    return {
        "seconds": seconds,
        "seconds_of_choice": planned,
        "steps": train.steps,
        "recorded": train.capture,
        "bits_per_byte": last["bits_per_byte"],
        "choice": list(chosen.lines),
    }
