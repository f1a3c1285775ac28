"""The log's figures for TensorBoard, for those who want them there too; `log.jsonl` stays the source of truth."""

from __future__ import annotations

import math
from pathlib import Path

from txl.errors import UserError


class Scalars:
    """Writes figures by step.

    Args:
        directory: the run's, in which the folder `tensorboard` is made; None: writes nothing.

    Raises:
        UserError: if TensorBoard is not installed.
    """

    def __init__(self, directory: Path | None):
        self._writer = None
        if directory is not None:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError:
                raise UserError(
                    "train.tensorboard needs the package tensorboard; install it with pip install "
                    "'transformer-xl[tensorboard]', or set --train.tensorboard false"
                ) from None
            self._writer = SummaryWriter(str(directory / "tensorboard"))

    def add(self, step: int, figures: dict[str, float]) -> None:
        """Write figures of a step; those that are not finite are left out."""
        if self._writer is not None:
            for name, value in figures.items():
                if math.isfinite(value):
                    self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Write what is still buffered."""
        if self._writer is not None:
            self._writer.close()
