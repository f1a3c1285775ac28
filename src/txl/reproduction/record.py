"""Write a table's page, and the JSON that holds everything on it."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from txl.files import write_whole
from txl.reproduction.outcome import Outcome, cells, headings
from txl.reproduction.page import outcome_page


def write_outcome(outcome: Outcome, out: Path, command: Sequence[str], circumstances: dict[str, Any]) -> dict[str, Any]:
    """Write NAME.json and NAME.html into a folder.

    Returns:
        What the JSON holds.
    """
    record = outcome_record(outcome, command, circumstances)
    name = outcome.definition.name
    write_whole(out / f"{name}.json", json.dumps(record, ensure_ascii=False, indent=1) + "\n")
    write_whole(out / f"{name}.html", outcome_page(outcome, out, command, circumstances))
    return record


def outcome_record(outcome: Outcome, command: Sequence[str], circumstances: dict[str, Any]) -> dict[str, Any]:
    """Return the contents of the page, ready for JSON."""
    definition = outcome.definition
    return {
        "what": definition.name,
        "title": definition.title,
        "paper": {"corpus": definition.corpus, "metric": definition.metric},
        "scale": outcome.scale.to_dict(),
        "corpus": outcome.corpus,
        "unit": outcome.unit,
        "seeds": outcome.seeds,
        "claims": [
            {
                "claim": claim.key,
                "text": claim.text,
                "paper": claim.paper,
                "outcome": verdict.outcome,
                "reason": verdict.reason,
            }
            for claim, verdict in outcome.verdicts()
        ],
        "rows": [
            {
                "row": result.row.key,
                "model": result.row.name,
                "paper": result.row.paper,
                "status": result.status,
                "reason": result.reason,
                "shown": dict(zip(headings(outcome), cells(outcome, result), strict=True)),
                "parameters": result.parameters,
                "config": result.config,
                "values": outcome.values[result.row.key],
                "loss_by_length": {
                    str(length): nll for length, nll in sorted(outcome.curves.get(result.row.key, {}).items())
                },
                "seeds": {str(seed): _without_losses(each) for seed, each in sorted(result.by_seed.items())},
            }
            for result in outcome.rows
        ],
        "gains": [
            {
                "group": gains.group,
                "seed": gains.seed,
                "row": name,
                "gains": [{"short": short, "long": long, "gain": gain} for (short, long), gain in each.items()],
            }
            for gains in outcome.gains
            for name, each in gains.gains.items()
        ],
        "command": list(command),
        **circumstances,
    }


def _without_losses(measured: dict[str, Any]) -> dict[str, Any]:
    """Return a measurement without the loss of every target, which stays in results/."""
    kept = {name: value for name, value in measured.items() if name not in ("losses", "config")}
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in kept.items()
    }
