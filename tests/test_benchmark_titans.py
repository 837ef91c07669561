"""The benchmark of memory against full attention does the work that it times; no timing is asserted."""

import json
from subprocess import CompletedProcess
from types import SimpleNamespace

import pytest
import torch

from benchmarks import titans_memory
from benchmarks.titans_memory import ANSWER, MODELS, VOCABULARY, WORK

pytestmark = pytest.mark.slow

OPTIONS = ("--quick", "--longest-step", "128")  # 128 and 256 tokens in chunks of 64


@pytest.fixture
def options():
    return titans_memory.arguments(OPTIONS)


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.parametrize("kind", MODELS)
def test_reading_scores_the_token_after_the_whole_sequence(kind, options):
    torch.manual_seed(0)
    model, one_pass = titans_memory.work(kind, "read", 256, options, "cpu")
    read = []
    model.get_input_embeddings().register_forward_pre_hook(lambda _, inputs: read.append(inputs[0].shape[-1]))
    logits = one_pass()
    assert logits.shape == (1, 1, VOCABULARY)
    assert not logits.requires_grad
    assert read == ([256] if kind == "full" else [64] * 4)


@pytest.mark.parametrize("kind", MODELS)
def test_a_training_step_reaches_every_weight_and_leaves_no_gradient(kind, options):
    model, one_pass = titans_memory.work(kind, "train", 128, options, "cpu")
    reached, rows = set(), []
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: reached.add(name))
    model.lm_head.register_forward_pre_hook(lambda _, inputs: rows.append(inputs[0].shape[-2]))
    one_pass()
    assert reached == {name for name, _ in model.named_parameters()}
    assert rows == [ANSWER + 1]
    assert all(parameter.grad is None for parameter in model.parameters())


def test_both_models_are_the_same_qwen_but_for_the_memory(options):
    full, memory = (titans_memory.build(kind, options, "cpu") for kind in MODELS)
    shapes = {name: parameter.shape for name, parameter in full.named_parameters()}
    others = {name: parameter.shape for name, parameter in memory.named_parameters()}
    assert shapes.items() < others.items()
    assert all("memory." in name for name in others.keys() - shapes.keys())


def test_every_cell_is_measured_by_its_own_command_line_and_told_in_the_table(options, monkeypatch):
    commands = []

    def in_this_process(command, **_):
        own = titans_memory.arguments(command[2:])
        kind, work, length = own.cell
        commands.append((work, int(length), kind))
        cell = titans_memory.measure_cell(kind, work, int(length), own)
        return CompletedProcess(command, 0, json.dumps(cell), "")

    monkeypatch.setattr(titans_memory, "subprocess", SimpleNamespace(run=in_this_process))
    result = titans_memory.measure(options, OPTIONS)
    cells = [("read", 128), ("read", 256), ("train", 128)]
    assert commands == [(*cell, kind) for cell in cells for kind in MODELS]
    assert [(row["work"], row["length"]) for row in result["rows"]] == cells
    for row in result["rows"]:
        assert all(row[kind]["seconds"] > 0 <= row[kind]["mib"] for kind in MODELS)
    assert json.loads(json.dumps(result, default=str))["settings"]["chunk"] == 64
    assert 0 < result["rows"][0]["memory"]["share"] < 1
    assert result["rows"][0]["full"]["share"] == result["rows"][2]["memory"]["share"] == 0
    assert len(titans_memory.report(result).splitlines()) == 4 + len(cells)


def test_the_table_is_microseconds_a_token_peaks_and_their_ratio():
    rows = [
        {"work": WORK[0], "length": 4096, "full": _cell(0.8192, 20.4), "memory": _cell(0.4096, 9.6, 1300, 0.08)},
        {"work": WORK[1], "length": 65536, "full": _cell(6.5536, 1000.0), "memory": _cell(13.1072, 80.0)},
    ]
    assert titans_memory.report({"rows": rows}).splitlines()[::4] == [
        "parameters: 1,000, and 300 of the memory",
        "| read | 4,096 | 200 · 20 | 100 · 10 | 8 % | 2.00 × |",
    ]
    assert titans_memory.report({"rows": rows}).splitlines()[5:] == [
        "| train | 65,536 | 100 · 1000 | 200 · 80 |  | 0.50 × |",
    ]


def _cell(seconds, mib, parameters=1000, share=0.0):
    return {"seconds": seconds, "mib": mib, "parameters": parameters, "share": share}


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--lengths", "15"), "--lengths must be at least 16; got 15"),
        (("--repeats", "0"), "--repeats must be at least 1; got 0"),
        (("--longest-step", "0"), "--longest-step must be at least 1; got 0"),
    ],
)
def test_sizes_that_cannot_be_measured_are_refused(words, told, capsys):
    with pytest.raises(SystemExit):
        titans_memory.arguments(words)
    assert told in capsys.readouterr().err
