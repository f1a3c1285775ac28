"""A table's outcome as Markdown, for the terminal."""

from __future__ import annotations

from txl.reproduction.outcome import Outcome, cells, headings


def markdown(outcome: Outcome) -> str:
    """The paper's numbers beside ours, and the claims."""
    definition = outcome.definition
    head = ["row", "model", *(f"{column} (paper)" for column in definition.columns), *headings(outcome)]
    lines = [f"{definition.title}, scale {outcome.scale.name}, {repeats_text(outcome)}", ""]
    lines += [_line(head), _line(["---"] * len(head))]
    for result in outcome.rows:
        row = result.row
        paper = [row.paper.get(column, "-") for column in definition.columns]
        lines.append(_line([row.key, row.name, *paper, *cells(outcome, result)]))
    lines.append("")
    for claim, verdict in outcome.verdicts():
        lines.append(f"{claim.key}: {verdict.outcome} - {claim.text} ({verdict.reason})")
    lines += [f"{each.row.key} failed: {each.reason}" for each in outcome.failed]
    return "\n".join(lines)


def repeats_text(outcome: Outcome) -> str:
    """1 seed, 3 seeds; 3 measurements of what is not trained."""
    word = "measurement" if outcome.definition.kind == "speed" else "seed"
    return f"{outcome.seeds} {word}{'' if outcome.seeds == 1 else 's'}"


def _line(fields: list[str]) -> str:
    return "| " + " | ".join(each.replace("|", "\\|") for each in fields) + " |"
