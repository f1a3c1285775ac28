"""A preset, and the table form in which one configuration is made from another."""

from __future__ import annotations

from dataclasses import dataclass, replace

from txl.config import FieldValues, RunConfig


@dataclass(frozen=True)
class Preset:
    """A named configuration with its source and published result."""

    run: RunConfig
    """The configuration itself, whose name is the preset's; `make` returns copies of it."""
    description: str
    source: str
    published: str
    """Published result on the test split of the corpus, or "none"."""
    vocab_size: int
    """Vocabulary size to which the published number of parameters refers."""

    @property
    def name(self) -> str:
        """Name of the preset."""
        return self.run.name

    def make(self) -> RunConfig:
        """Return a new copy of the configuration; the caller may change it."""
        return changed(self.run, self.name)


def changed(
    base: RunConfig,
    name: str,
    *,
    model: FieldValues | None = None,
    data: FieldValues | None = None,
    train: FieldValues | None = None,
    eval: FieldValues | None = None,
) -> RunConfig:
    """Return a copy of a configuration with another name, and other values of some fields of its sections."""
    return RunConfig(
        name,
        model=replace(base.model, **(model or {})),
        data=replace(base.data, **(data or {})),
        train=replace(base.train, **(train or {})),
        eval=replace(base.eval, **(eval or {})),
    )
