"""The log of a training, one JSON object per line, and its picture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from deformops_models.console import UsageError, whole_file


class History:
    """Rows that say what happened at a step; each is in the file as soon as it is known.

    Args:
        file: where they are kept; rows after `step` are dropped, as the training goes on from there.
        step: optimizer steps that are done.
    """

    def __init__(self, file: Path, step: int) -> None:
        self.file = file
        self.rows: list[dict[str, Any]] = [row for row in read(file) if row["step"] <= step] if step else []
        with whole_file(file) as temporary:
            temporary.write_text("".join(map(_line, self.rows)), encoding="utf-8")

    def add(self, **row: Any) -> None:
        self.rows.append(row)
        with self.file.open("a", encoding="utf-8") as file:
            file.write(_line(row))

    def scores(self) -> dict[int, float | None]:
        """The average precision by the step after which it was measured."""
        return {row["step"]: row["AP"] for row in self.rows if "AP" in row}

    def draw(self, picture: Path) -> None:
        """Draws loss and average precision over the steps."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(8, 4.5), layout="constrained")
        axes = figure.subplots()
        steps, losses = _curve(self.rows, "loss")
        axes.plot(steps, losses, color="tab:blue", alpha=0.3, linewidth=1)
        axes.plot(steps, _smooth(losses), color="tab:blue", label="loss")
        axes.set(xlabel="step", ylabel="loss")
        axes.grid(alpha=0.3)
        steps, scores = _curve(self.rows, "AP")
        right = axes.twinx()
        right.plot(steps, scores, "o-", color="tab:orange", label="AP of the val split")
        right.set(ylabel="AP, %", ylim=(0, max([*scores, 1]) * 1.1))
        figure.legend(loc="outside upper center", ncols=2, frameon=False)
        with whole_file(picture) as temporary:
            figure.savefig(temporary, dpi=110)


def read(file: Path) -> list[dict[str, Any]]:
    """Returns the rows of a log; a line that a killed process left unfinished is not one.

    Raises:
        UsageError: a finished line is damaged.
    """
    rows = []
    if file.is_file():
        for number, line in enumerate(file.read_text(encoding="utf-8", errors="replace").split("\n")[:-1], 1):
            try:
                row = json.loads(line)
                if not (isinstance(row, dict) and isinstance(row.get("step"), int)):
                    raise ValueError("it says no step")
                rows.append(row)
            except ValueError as error:
                raise UsageError(f"{file}, line {number}: {error}; take this line out of it") from None
    return rows


def _line(row: dict[str, Any]) -> str:
    return json.dumps(row) + "\n"


def _curve(rows: list[dict[str, Any]], key: str) -> tuple[list[int], list[float]]:
    chosen = [row for row in rows if row.get(key) is not None]
    return [row["step"] for row in chosen], [row[key] for row in chosen]


def _smooth(values: list[float], keep: float = 0.9) -> list[float]:
    """An exponential average without the bias of its start."""
    smooth, total, weight = [], 0.0, 0.0
    for value in values:
        total, weight = keep * total + (1 - keep) * value, keep * weight + (1 - keep)
        smooth.append(total / weight)
    return smooth
