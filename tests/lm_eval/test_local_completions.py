"""lm-evaluation-harness with a server: its log-likelihoods equal those of `txl score`. Run by `make lm-eval`."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest

os.environ["HF_HUB_OFFLINE"] = os.environ["HF_DATASETS_OFFLINE"] = "1"
lm_eval = pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed; see `make lm-eval`")

from lm_eval.tasks import TaskManager  # pyright: ignore[reportMissingImports]

from tests.serving.conftest import LENGTHS, running
from txl.evaluation.surprisal import surprisals
from txl.runs.directory import RunDirectory
from txl.serving.service import Served, Service

QUESTIONS = [
    {"question": "12. The river rose in", "choices": [" the night", " a morning", " no time"], "answer": 0},
    {
        "question": "They carried what they could — “",
        "choices": ["to the mill", "how", "until it is over”"],
        "answer": 2,
    },
    {"question": "Nobody", "choices": [" in", " could remember such a flood; not even the oldest"], "answer": 1},
]
DOCUMENTS = ["The river rose.\n", "“How long?” she asked. “Until it is over,” said the miller.\n" * 60]
CHOICE = """
task: local_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
output_type: multiple_choice
test_split: test
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
target_delimiter: ""
metric_list: [{{metric: acc}}]
"""
ROLLING = """
task: local_rolling
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
output_type: loglikelihood_rolling
test_split: test
doc_to_text: ""
doc_to_target: "{{{{text}}}}"
metric_list: [{{metric: bits_per_byte}}]
"""


@pytest.fixture(scope="module")
def served(trained):
    model, vocabulary = RunDirectory(trained).load()
    assert vocabulary is not None
    with running(Service(Served(model, vocabulary, "small", max_streams=4, segment=8, **LENGTHS))) as server:
        yield server


@pytest.fixture(scope="module")
def found(served, tmp_path_factory) -> dict[str, Any]:
    """Results of the harness for one task of each kind."""
    folder: Path = tmp_path_factory.mktemp("tasks")
    for name, template, rows in (
        ("choice", CHOICE, QUESTIONS),
        ("rolling", ROLLING, [{"text": text} for text in DOCUMENTS]),
    ):
        file = folder / f"{name}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        (folder / f"{name}.yaml").write_text(template.format(file=file))
    os.environ["HF_DATASETS_CACHE"] = str(folder / "cache")
    url = f"base_url={served.url}/v1/completions"
    return lm_eval.simple_evaluate(
        model="local-completions",
        model_args=f"model=small,{url},tokenized_requests=True,max_length=100000,num_concurrent=1,max_retries=1",
        tasks=["local_choice", "local_rolling"],
        task_manager=TaskManager(include_path=str(folder), include_defaults=False),
        log_samples=True,
        bootstrap_iters=0,
    )


def nats(served, text: str, before: str) -> float:
    rows = surprisals(
        served.service.served.model, served.service.served.vocabulary, text, prompt=before, segment=8, **LENGTHS
    )
    return -math.log(2) * sum(row.surprisal for row in rows if row.surprisal is not None)


def test_multiple_choice(found, served):
    right = 0
    for sample, question in zip(found["samples"]["local_choice"], QUESTIONS, strict=True):
        expected = [nats(served, choice, question["question"]) for choice in question["choices"]]
        assert [float(each[0][0]) for each in sample["resps"]] == pytest.approx(expected, abs=1e-5)
        right += max(range(len(expected)), key=expected.__getitem__) == question["answer"]
    assert found["results"]["local_choice"]["acc,none"] == pytest.approx(right / len(QUESTIONS))


def test_rolling(found, served):
    """A document much longer than the harness's default of 2048 tokens is read as one text, with memory."""
    expected = [nats(served, text, "\n") for text in DOCUMENTS]
    values = [float(sample["resps"][0][0]) for sample in found["samples"]["local_rolling"]]
    for text, value, nat in zip(DOCUMENTS, values, expected, strict=True):
        assert value / len(text.encode()) == pytest.approx(nat / len(text.encode()), abs=1e-5)
    n_byte = sum(len(text.encode()) for text in DOCUMENTS)
    bits = -sum(expected) / n_byte / math.log(2)
    assert found["results"]["local_rolling"]["bits_per_byte,none"] == pytest.approx(bits, abs=1e-5)
