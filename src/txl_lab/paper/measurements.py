"""Measurements of a table: a class for each kind, which measures a model, gathers over seeds, prints and draws."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from txl.analysis.attention_record import analyse_attention
from txl.analysis.average_attention import AttentionPlan
from txl.analysis.samples import Plan, make_samples
from txl.config import RunConfig, TransformerXLConfig, model_from_dict
from txl.data.corpora import Corpus
from txl.data.detokenise import convention_of
from txl.data.prepared import Tokens
from txl.data.vocabulary import Vocabulary
from txl.errors import UserError
from txl.evaluation.effective_context import effective_context, spread_targets
from txl.evaluation.perplexity import evaluate_with
from txl.evaluation.sliding import evaluate_sliding, losses_at_contexts, sliding_losses
from txl.evaluation.stream import EvaluationResult, Settings
from txl.files import JsonObject
from txl.models.family import FamilyModel
from txl.presets import find_preset
from txl.reporting.attention_page import write_attention
from txl.reporting.plots import Plot
from txl.reporting.samples_page import About, settings_text, write_samples
from txl.units import is_character_unit, measure_name, quality
from txl_lab.paper import figures
from txl_lab.paper.outcome import shown, spread_text
from txl_lab.paper.scales import Scale
from txl_lab.paper.schema import COSTS, DrawnFigure, GroupGains, Measurement, Outcome, Row, RowResult
from txl_lab.speed import transformer_xl_of
from txl_lab.speed.table9 import slowdown

Say = Callable[[str], None]
WINDOWS = 64  # windows that a sliding evaluation computes at once


def loss_at(
    model: FamilyModel, run: RunConfig, tokens: Tokens, length: int, max_tokens: int | None
) -> EvaluationResult:
    """Return the mean loss of all tokens except the first, at an attention length.

    A model that was trained with memory gets a memory and a window of this length. A model that was trained without
    memory reads windows of this length that slide by one token. A recurrent network carries its state and needs no
    length.
    """
    if not run.model.carries_state:
        return evaluate_sliding(model, tokens, context=length, batch_size=WINDOWS, max_tokens=max_tokens)
    mem_len = 0 if run.model.constant_state else length
    return _loss_as_tested(model, run, tokens, Settings(mem_len=mem_len, clamp_len=run.eval.clamp_len), max_tokens)


def _loss_as_tested(
    model: FamilyModel, run: RunConfig, tokens: Tokens, lengths: Settings, max_tokens: int | None
) -> EvaluationResult:
    """Return the mean loss of all tokens except the first, with the given lengths and the run's other test settings.

    If only part of the split is read, it is read in one lane. Several lanes would each begin with an empty memory, and
    in short lanes a long memory would never fill, whereas a sliding window always has its full length.
    """
    lanes = run.eval.batch_size if max_tokens is None else 1
    settings = replace(lengths, segment=run.eval.segment, batch_size=lanes, max_tokens=max_tokens)
    return evaluate_with(model, tokens, replace(settings, exhaustive=True, temperature=run.eval.temperature))


def _described(run: RunConfig, length: int) -> str:
    """Return in words how `loss_at` reads."""
    if run.model.constant_state:
        return "state carried along"
    return f"attention length {length}" + ("" if run.model.mem_len else ", sliding by one token")


@dataclass(frozen=True)
class Trained:
    """A trained model of a row."""

    model: FamilyModel
    vocabulary: Vocabulary
    run: RunConfig
    corpus: Corpus
    directory: Path  # run directory
    checkpoint: str  # name of the model's checkpoint
    made: Path  # folder for files that are made with the model; created if missing.


class ModelMeasurement(Measurement, ABC):
    """A kind of table whose rows are trained models."""

    @abstractmethod
    def measure(self, trained: Trained, scale: Scale, say: Say) -> JsonObject:
        """Return the measurements of one trained model, ready for JSON; under "files" the paths of files made."""

    def least_tokens(self, run: RunConfig, scale: Scale) -> dict[str, int]:
        """Return the least number of tokens of each split that a measurement of a run's model needs."""
        return {"test": 2}


def _drawn(heading: str, drawing: Plot | None, caption: str) -> list[DrawnFigure]:
    return [] if drawing is None else [(heading, drawing, caption)]


class Quality(ModelMeasurement):
    """Loss on the test split under the run's test settings."""

    measures = ("quality",)
    tests_as_trained = True

    def measure(self, trained: Trained, scale: Scale, say: Say) -> JsonObject:
        run, tokens = trained.run, trained.corpus.tokens("test")
        length = run.train.segment if run.model.mem_len == 0 else run.eval.mem_len
        say(f"test split, {_described(run, length)}")
        if run.model.carries_state:
            result = _loss_as_tested(
                trained.model, run, tokens, Settings(**run.eval.lengths.options()), scale.eval_tokens
            )
        else:
            result = loss_at(trained.model, run, tokens, length, scale.eval_tokens)
        return {"quality": quality(result.nll, trained.corpus.unit), "test": result.to_dict()}

    def headings(self, outcome: Outcome) -> tuple[str, ...]:
        costs = COSTS.values() if outcome.definition.cost_beside else ()
        return ("parameters", measure_name(outcome.unit), *costs, "status")

    def cells(self, outcome: Outcome, result: RowResult, status: str) -> tuple[str, ...]:
        values = outcome.values[result.row.key]
        names = COSTS if outcome.definition.cost_beside else ()
        costs = [f"{shown(outcome, result, name, 2)}x" if values.get(name) else "-" for name in names]
        return (result.parameters_text, shown(outcome, result, "quality"), *costs, status)

    def figures(self, outcome: Outcome) -> list[DrawnFigure]:
        every_seed = figures.quality_figure(outcome)
        parts = _drawn("Over seeds", every_seed, "Each dot is a seed, each bar the mean of a row.")
        if beside := outcome.definition.cost_beside:
            text = f"Training time a token over that of {beside}."
            parts += _drawn("Against time", figures.cost_figure(outcome), text)
        return parts


class Attention(ModelMeasurement):
    """Loss at the length of the training segment, and at the attention length that is best on the validation split.

    Every length is tried on the validation split. The best is the shortest length with the lowest perplexity, rounded
    to two decimals as in the paper's table (bits per character: to three). The test split is read at the training
    segment's length and at the best length.
    """

    measures = ("quality", "init", "attention", "training length")

    def measure(self, trained: Trained, scale: Scale, say: Say) -> JsonObject:
        model, run, corpus = trained.model, trained.run, trained.corpus
        lengths = [length for length in scale.attention_lengths_of(run) if length <= (model.context or length)]
        losses, tokens = {}, corpus.tokens("valid")
        if run.model.carries_state:
            for length in lengths:
                say(f"validation split, {_described(run, length)}")
                losses[length] = loss_at(model, run, tokens, length, scale.eval_tokens).nll
        else:
            say(f"validation split, windows of {lengths[0]} to {lengths[-1]} tokens")
            losses = sliding_losses(model, tokens, contexts=lengths, batch_size=WINDOWS, max_tokens=scale.eval_tokens)
        curve = [{"length": length, "nll": nll, "quality": quality(nll, corpus.unit)} for length, nll in losses.items()]
        digits = 3 if is_character_unit(corpus.unit) else 2
        lowest = min(round(point["quality"], digits) for point in curve)
        best = next(point["length"] for point in curve if round(point["quality"], digits) == lowest)
        training, tokens = run.train.segment, corpus.tokens("test")
        tested = {length: loss_at(model, run, tokens, length, scale.eval_tokens) for length in {training, best}}
        return {
            "init": quality(tested[training].nll, corpus.unit),
            "quality": quality(tested[best].nll, corpus.unit),
            "attention": best,
            "training length": training,
            "curve": curve,
            "test": {str(length): result.to_dict() for length, result in tested.items()},
        }

    def least_tokens(self, run: RunConfig, scale: Scale) -> dict[str, int]:
        return {"valid": 2, "test": 2}

    def gather(self, outcome: Outcome) -> None:
        for result in outcome.rows:
            if result.config is not None:
                reach = model_from_dict(result.config["model"]).mem_len + result.config["train"]["segment"]
                outcome.values[result.row.key]["training reach"] = [float(reach)] * len(result.by_seed)
        outcome.grids["attention"] = _tried_lengths(outcome)

    def headings(self, outcome: Outcome) -> tuple[str, ...]:
        measure = measure_name(outcome.unit)
        return ("parameters", "backprop len", f"{measure} init", f"{measure} best", "attn len", "status")

    def cells(self, outcome: Outcome, result: RowResult, status: str) -> tuple[str, ...]:
        segment = outcome.values[result.row.key].get("training length", ())[:1]  # equal for all seeds
        numbers = [shown(outcome, result, name) for name in ("init", "quality")]
        best = shown(outcome, result, "attention", 0)
        return (result.parameters_text, spread_text(segment, 0), *numbers, best, status)

    def figures(self, outcome: Outcome) -> list[DrawnFigure]:
        keys = [row.key for row in outcome.definition.rows]
        text = "Validation split, means over seeds; the best length of each row was chosen here."
        return [
            *_drawn("Over seeds", figures.quality_figure(outcome), "Each dot is a seed, each bar the mean of a row."),
            *_drawn(
                "Against attention length", figures.length_figure(outcome, keys, "attention", "attention length"), text
            ),
        ]


def _tried_lengths(outcome: Outcome) -> list[float]:
    return sorted({float(length) for curve in outcome.curves.values() for length in curve})


class Context(ModelMeasurement):
    """Loss at exact context lengths (Appendix C)."""

    compares_losses = True
    fractions = (0.1, 0.5, 1.0)  # the values of r in Table 8

    def measure(self, trained: Trained, scale: Scale, say: Say) -> JsonObject:
        run, tokens, lengths = trained.run, trained.corpus.tokens("test"), scale.context_lengths
        targets = spread_targets(len(tokens), lengths[-1], scale.targets, lengths.step)
        say(f"test split, {len(targets):,} targets behind {lengths[0]} to {lengths[-1]} tokens of context")
        # At distances beyond those of training, losses are noise, and the metric would count some of it as gains.
        window = run.train.segment + run.model.mem_len if isinstance(run.model, TransformerXLConfig) else None
        losses = losses_at_contexts(
            trained.model,
            tokens,
            contexts=lengths,
            targets=targets,
            batch_size=WINDOWS,
            window=window or "none",
            clamp_len=run.eval.lengths.options()["clamp_len"],
        )
        return {
            "losses": {str(length): values.tolist() for length, values in losses.items()},
            "targets": len(targets),
            "window": window,
            "longest_context": trained.model.context,
        }

    def least_tokens(self, run: RunConfig, scale: Scale) -> dict[str, int]:
        return {"test": scale.longest_context + 1}

    def gather(self, outcome: Outcome) -> None:
        """Add the RECL, quality, gains and loss by context length of each model.

        The models of a group with the same seed share a baseline. A seed counts only if every model of the group has
        results for the seed, because a missing model would change the baseline and so the values of the other models.
        """
        for group, results in outcome.groups.items():
            members = [result for result in results if result.row.trained]
            for seed in sorted(set.intersection(*(set(member.by_seed) for member in members))):
                measured = {member.row.key: member.by_seed[seed] for member in members}
                if all("effective context" in result for result in measured.values()):
                    outcome.gains.append(self._recorded(outcome, measured, group, seed))
                elif all("losses" in result for result in measured.values()):
                    outcome.gains.append(self._contexts(outcome, measured, group, seed))
        outcome.grids.update({f"r = {r:.1f}": _tried_lengths(outcome) for r in self.fractions})

    def _recorded(self, outcome: Outcome, measured: Mapping[str, JsonObject], group: str, seed: int) -> GroupGains:
        """Take a group from a record, which has no losses of single targets."""
        gains = {}
        for key, result in measured.items():
            recorded = result["effective context"]
            for name, value in recorded["values"].items():
                outcome.values[key].setdefault(name, []).append(value)
            for length, loss in recorded["curve"].items():
                outcome.curves.setdefault(key, {}).setdefault(int(length), []).append(loss)
            gains[key] = {(gain["short"], gain["long"]): gain["gain"] for gain in recorded["gains"]}
        return GroupGains(group, seed, gains)

    def _contexts(self, outcome: Outcome, measured: Mapping[str, JsonObject], group: str, seed: int) -> GroupGains:
        losses = {
            key: {int(c): torch.tensor(values, dtype=torch.float64) for c, values in result["losses"].items()}
            for key, result in measured.items()
        }
        longest = {key: result.get("longest_context") for key, result in measured.items()}
        context = effective_context(losses, self.fractions, longest=longest, step=outcome.scale.context_step)
        for r, by_model in context.recl.items():
            for key, length in by_model.items():
                outcome.values[key].setdefault(f"r = {r:.1f}", []).append(length)
        for key, by_length in losses.items():
            for length, values in by_length.items():
                outcome.curves.setdefault(key, {}).setdefault(length, []).append(values.mean().item())
            at_longest = by_length[max(by_length)].mean().item()  # the same targets for all models
            outcome.values[key].setdefault("quality", []).append(quality(at_longest, outcome.unit))
        by_pair = context.perplexity_gains[self.fractions[0]]
        gains = {key: {pair: models[key] for pair, models in by_pair.items()} for key in losses}
        return GroupGains(group, seed, gains)

    def headings(self, outcome: Outcome) -> tuple[str, ...]:
        return ("parameters", measure_name(outcome.unit), *(f"r = {r:.1f}" for r in self.fractions), "status")

    def cells(self, outcome: Outcome, result: RowResult, status: str) -> tuple[str, ...]:
        lengths = [shown(outcome, result, f"r = {r:.1f}", 0) for r in self.fractions]
        return (result.parameters_text, shown(outcome, result, "quality"), *lengths, status)

    def figures(self, outcome: Outcome) -> list[DrawnFigure]:
        parts = []
        for group, results in outcome.groups.items():
            keys = [result.row.key for result in results]
            drawing = figures.length_figure(outcome, keys, f"context-{group}", "context length")
            parts += _drawn(
                f"Figure 4, group {group}", drawing, "Perplexity of the same test targets, means over seeds."
            )
            for gains in [gains for gains in outcome.gains if gains.group == group][:1]:
                text = (
                    f"exp f(c,c) − exp f(c,c′) with r = 0.1, seed {gains.seed}; what stands out more gains more from "
                    "the longer context."
                )
                parts.append((f"Figure 3, group {group}", figures.gains_figure(gains, keys), text))
        return parts


class Speed(Measurement):
    """Slowdown of Table 9, as in `txl bench table9`; nothing is trained."""

    measures = ("slower",)
    repeat = "measurement"
    segment = 128  # number of tokens that Transformer-XL reads at once

    def time(self, row: Row, scale: Scale, device: str) -> JsonObject:
        assert row.preset is not None
        published = find_preset(row.preset)
        # Full attention lengths need the full model, because only their results are compared with the paper's.
        shape = transformer_xl_of(published.make() if scale.speed_lengths == 1 else scale.base("character"))
        length, dtype = scale.speed_length(row.length), scale.dtype or "float32"
        timed = slowdown(shape, published.vocab_size, length, self.segment, scale.speed_steps, device, dtype)
        return {"slower": timed.ratio, **timed.to_dict()}

    def headings(self, outcome: Outcome) -> tuple[str, ...]:
        return ("attn len", "slower", "status")

    def cells(self, outcome: Outcome, result: RowResult, status: str) -> tuple[str, ...]:
        lengths = {measured["attention_length"] for measured in result.by_seed.values()}
        times = f"{shown(outcome, result, 'slower', 0)}x" if outcome.values[result.row.key].get("slower") else "-"
        return (", ".join(f"{length:,}" for length in lengths) or "-", times, "measured" if lengths else status)

    def figures(self, outcome: Outcome) -> list[DrawnFigure]:
        return _drawn("Slowdown", figures.speed_figure(outcome), "Means over the measurements.")


class AttentionFigures(ModelMeasurement):
    """Files of Figures 5 to 7, made with one trained model."""

    results = "attention"
    has_numbers = False
    split = "valid"

    def measure(self, trained: Trained, scale: Scale, say: Say) -> JsonObject:
        tested = trained.run.eval
        settings = Settings(
            segment=tested.segment,
            batch_size=tested.batch_size,
            max_tokens=scale.eval_tokens,
            **tested.lengths.options(),
        )
        record = analyse_attention(
            trained.model,
            trained.vocabulary,
            trained.corpus,
            self.split,
            settings,
            AttentionPlan(),
            checkpoint=trained.checkpoint,
        )
        return {"files": write_attention(record, trained.made, str(trained.directory))}

    def least_tokens(self, run: RunConfig, scale: Scale) -> dict[str, int]:
        """Return the tokens up to the first one that sees all of the memory, and its target."""
        least = (run.eval.window or run.eval.mem_len + 1) + 1
        if scale.eval_tokens is not None and scale.eval_tokens < least:
            raise UserError(
                field="eval_tokens",
                value=scale.eval_tokens,
                but=f"only after {least:,} tokens does a token see the whole memory",
                expected=f"{least:,} or more",
            )
        return {self.split: least}


class Samples(ModelMeasurement):
    """Texts of Appendix E, generated by one trained model."""

    results = "samples"
    has_numbers = False
    split = "test"

    def measure(self, trained: Trained, scale: Scale, say: Say) -> JsonObject:
        plan, convention = Plan(lengths=trained.run.eval.lengths), convention_of(trained.vocabulary)
        corpus, training = trained.corpus, trained.corpus.tokens("train")
        samples = make_samples(
            trained.model, trained.vocabulary, corpus.tokens(self.split), training, plan, convention=convention
        )
        about = About(
            str(trained.directory),
            trained.checkpoint,
            corpus.name,
            self.split,
            corpus.unit,
            convention,
            settings_text(plan),
            len(training),
        )
        return {"files": write_samples(samples, about, plan, trained.made)[1]}

    def least_tokens(self, run: RunConfig, scale: Scale) -> dict[str, int]:
        return {self.split: Plan.context + Plan.max_tokens + Plan.count - 1}


def is_finite(measured: JsonObject | list[object]) -> bool:
    """Return True if all numbers of a measurement are finite."""
    values = measured.values() if isinstance(measured, dict) else measured
    return all(
        is_finite(value) if isinstance(value, (dict, list)) else not isinstance(value, float) or math.isfinite(value)
        for value in values
    )


# Kinds of tables by their names in `tables.toml`
MEASUREMENTS: dict[str, Measurement] = {
    "quality": Quality(),
    "attention": Attention(),
    "context": Context(),
    "speed": Speed(),
    "attention figures": AttentionFigures(),
    "samples": Samples(),
}
