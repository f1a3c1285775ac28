"""The model that is trained: which configurations and devices are refused, and how the model is built."""

from __future__ import annotations

import torch

from txl.config import ModelConfig, RunConfig, TrainConfig
from txl.data.vocabulary import Vocabulary
from txl.errors import Field, UserError
from txl.models import FAMILIES, build_model
from txl.models.family import FamilyModel
from txl.training.compilation import check_capture


def check_trainable(run: RunConfig, device: str) -> None:
    """Refuse a configuration that cannot be trained on a device.

    Raises:
        UserError: if so, naming the reason.
    """
    train = run.train
    if device.partition(":")[0] not in ("cpu", "cuda"):
        problem = "training is not supported, because the device's random numbers are not saved with the run"
        raise UserError(problem, field="device", value=device, remedy=("use ", Field("device", "cpu")))
    FAMILIES[type(run.model)].check_training(run.model, device, getattr(torch, train.dtype))
    if train.capture:
        check_capture(run, device)
    if train.tf32 and not device.startswith("cuda"):
        but = f"this run trains on {device}, and TF32 needs an NVIDIA GPU"
        raise UserError(field="train.tf32", value=True, but=but, remedy="leave it out")


def model_to_train(model: ModelConfig, vocabulary: Vocabulary | int, device: str, train: TrainConfig) -> FamilyModel:
    """Return a new model in training mode on a device; its initial weights come from the global random generators.

    Args:
        model: configuration of the model.
        vocabulary: vocabulary, or its size V.
        device: device that trains.
        train: training configuration. With `dtype` "float64" the weights are float64, otherwise float32; on the dtype
            and on `capture` the choice of attention depends.
    """
    dtype = getattr(torch, train.dtype)
    if train.capture:
        model = FAMILIES[type(model)].for_captured_steps(model, device, dtype)
    built = build_model(model, vocabulary, device, dtype).to(device).train()
    return built.double() if train.dtype == "float64" else built
