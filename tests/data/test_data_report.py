"""Rank 0's printed and written report on the data: every document that is cut or left out, and the steps."""

import contextlib
import io
import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from tests.lib.ranks import in_turn, run_ranks
from tests.lib.tiny_model import VOCABULARY
from tests.lib.tokenized_data import random_documents, write_tokenized
from tests.lib.training import into
from verl_ext.data import SFTDataSet
from verl_ext.data.packs.usage import repetition_notices
from verl_ext.fsdp_sft_trainer import train_composed
from verl_ext.metrics import LengthBins
from verl_ext.packing import TOKENS
from verl_ext.tools.plan.command import plan as plan_run
from verl_ext.tools.plan.options import PlanOptions
from verl_ext.trainer.report import data_facts, step_facts
from verl_ext.trainer.report_lines import report_lines
from verl_ext.trainer.start import compose_and_run
from verl_ext.trainer.step_plan import StepPlan


@pytest.fixture
def folder(tmp_path):
    """Lengths 3, 9, 5, 2, 20 and an empty document; that of 5 has no target; cut to 8, that of 20 loses all targets."""
    documents = random_documents(np.random.default_rng(0), [3, 9, 5, 2, 20, 0], VOCABULARY, 2)
    documents[2]["loss_mask"][:] = 0
    documents[4]["loss_mask"][:19] = 0
    for document in documents:
        document["category_ids"] = document["loss_mask"] * np.int32(2)
    return write_tokenized(tmp_path / "data", documents, {1: "maths", 2: "code"})


def rows_of(facts):
    names = ("category", "reason", "documents", "tokens", "tokens_kept")
    return [tuple(row[name] for name in names) for row in facts["omitted_documents"]]


def test_every_document_that_is_not_trained_on_as_it_stands_has_a_reason(folder):
    facts = data_facts(SFTDataSet(folder, max_tokens=8, over_length="truncate"))
    assert rows_of(facts) == [
        ("code", "truncate", 2, 29, 16),
        ("(none)", "empty", 1, 0, 0),
        ("(none)", "no target", 2, 13, 13),
    ]
    assert [round(row["share"], 6) for row in facts["omitted_documents"]] == [round(29 / 39, 6), 0, round(13 / 39, 6)]
    assert (facts["documents"], facts["tokens"], facts["packs"]) == (5, 26, 4)


def test_a_split_document_lacks_a_target_if_all_its_pieces_do_and_documents_beyond_max_samples_are_counted(folder):
    facts = data_facts(SFTDataSet(folder, max_tokens=8, over_length="split"))
    assert rows_of(facts)[2] == ("(none)", "no target", 1, 5, 5)
    assert facts["tokens"] == 39
    facts = data_facts(SFTDataSet(folder, max_tokens=8, over_length="drop", max_samples=2))
    assert rows_of(facts) == [("code", "drop", 1, 9, 0), ("(none)", "beyond max_samples", 4, 27, 0)]
    assert [row["share"] for row in facts["omitted_documents"]] == [9 / 39, 27 / 39]


def test_tokens_and_epochs_by_source_and_length_count_every_draw(folder, tmp_path):
    """Lengths 3, 9, 5, 2 and 20 of category code but for that of 5, and another folder's 4 and 30 tokens."""
    documents = random_documents(np.random.default_rng(1), [4, 30], VOCABULARY, 1)
    other = write_tokenized(tmp_path / "other", documents, {1: "maths"})
    bins = LengthBins((4, 9))
    rows = SFTDataSet([folder, other], max_tokens=32).usage(bins)
    assert [(row.source, row.low, row.high, row.documents, row.tokens, row.epochs) for row in rows] == [
        ("data", 0, 4, 2, 5, 1.0),
        ("data", 4, 9, 2, 14, 1.0),
        ("data", 9, None, 1, 20, 1.0),
        ("other", 0, 4, 1, 4, 1.0),
        ("other", 9, None, 1, 30, 1.0),
    ]
    assert [row.share for row in rows] == [5 / 73, 14 / 73, 20 / 73, 4 / 73, 30 / 73]
    # The documents of 9 and 20 tokens are drawn by both sources, those of 3 by one.
    mixture = {"sources": {"long": {"tokens": 58, "intervals": [8, 20]}, "all": {"tokens": 39}}}
    rows = SFTDataSet(folder, max_tokens=32, mixture=mixture).usage(bins)
    assert [(row.low, row.documents, row.tokens, row.epochs) for row in rows] == [
        (0, 2, 5, 1.0),
        (4, 2, 14 + 18, 32 / 14),
        (9, 1, 60, 3.0),
    ]
    twice = [row.times(2) for row in rows]
    (line,) = repetition_notices(twice, "data.train_dir")
    assert line.startswith("data.train_dir: 95% of the tokens")  # 92 of 97
    assert "most often data, 9 < length: 6 epochs" in line
    assert list(repetition_notices(rows, "data.train_dir")) == []


def test_documents_that_a_mixture_does_not_draw_are_counted_and_only_drawn_ones_lack_a_target(folder):
    mixture = {"sources": {"long": {"tokens": 58, "intervals": [8, 20]}}}
    facts = data_facts(SFTDataSet(folder, max_tokens=20, mixture=mixture))
    assert facts["documents"] == 4  # those of 9 and 20 tokens, each drawn twice
    assert rows_of(facts) == [("(none)", "empty", 1, 0, 0), ("(none)", "not drawn", 3, 10, 0)]
    assert facts["omitted_documents"][1]["share"] == 10 / 39


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(5, 60), st.sampled_from(["drop", "truncate", "split"]), st.integers(5, 20))
def test_tokens_of_no_pack_are_removed_once_in_the_report(folder, budget, policy, max_tokens):
    mixture = {"sources": {"all": {"tokens": budget}}}
    dataset = SFTDataSet(folder, max_tokens=max_tokens, over_length=policy, mixture=mixture)
    assume(dataset.facts().targets.any())
    held = dataset.spans.length[np.unique(dataset.plan().document_index)].sum()
    removed = sum(row["tokens_removed"] for row in data_facts(dataset)["omitted_documents"])
    assert held + removed == 39


def test_documents_that_all_stand_as_they_are_make_no_table(tmp_path):
    documents = random_documents(np.random.default_rng(0), [3, 9], VOCABULARY, 1)
    dataset = SFTDataSet(write_tokenized(tmp_path / "data", documents), max_tokens=16)
    facts = data_facts(dataset)
    assert facts["omitted_documents"] == []
    assert list(report_lines({"train": facts})) == [
        f"train: 2 documents, 12 tokens ({facts['target_tokens']} targets) in 1 packs of 16, 75.0% full"
    ]


@pytest.mark.parametrize(("least", "shares"), [(9, True), (10, False)])
def test_shared_beginnings_that_share_nothing_are_said_with_the_way_out(tmp_path, least, shares):
    documents = random_documents(np.random.default_rng(0), [12, 14], VOCABULARY, 1)
    documents[1]["input_ids"][:9] = documents[0]["input_ids"][:9]
    folder = write_tokenized(tmp_path / "data", documents)
    dataset = SFTDataSet(folder, max_tokens=64, share_prefixes=True, share_least=least)
    told = [line for line in report_lines({"train": data_facts(dataset)}) if "data.share_least" in line]
    assert [line.partition(" shares")[0] for line in told] == ["train: data.share_prefixes=true"] * (not shares)


def test_the_steps_say_what_the_ranks_wait_for_and_what_is_left_out(folder):
    dataset = SFTDataSet(folder, max_tokens=20, strategy="none")
    costs = dataset.facts(TOKENS).costs
    assert sorted(costs) == [2, 3, 5, 9, 20]
    plan = StepPlan(5, 2, seed=0, drop_last=True, costs=costs, group_size=2)
    facts = step_facts(dataset.facts(), plan, ranks=2, micro_batch_size=1)
    (left,) = plan.left_out(0)
    assert (facts["left_out_packs"], facts["left_out_documents"], facts["left_out_tokens"]) == (1, 1, costs[left])
    kept = np.sort(np.delete(costs, left))
    assert facts["busy"] == pytest.approx(kept.sum() / (2 * (kept[1] + kept[3])))
    assert facts["busy"] >= facts["busy_if_shuffled"]
    lines = "\n".join(report_lines({"steps": facts}))
    assert "every epoch leaves out other packs (data.drop_last=true); the first 1, 1 documents" in lines


def command(folder, act, overrides):
    """Return the output of the command on its only rank."""
    os.chdir(folder)
    with contextlib.redirect_stdout(io.StringIO()) as printed, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["command"])
        compose_and_run(overrides, act)
    return printed.getvalue()


def plan(composed):
    plan_run(composed, PlanOptions())


@pytest.mark.slow
def test_a_plan_without_training_is_printed_and_written_and_leaves_the_folder_usable(folder, tiny_model, tmp_path):
    run = tmp_path / "run"
    given = ["data.max_tokens=20", "data.train_batch_size=2", "data.num_workers=0", "parallel=cpu", "optim.lr=1e-3"]
    given += [f"data.train_dir={folder}", f"model.path={tiny_model}", into(run)]
    calls = [(command, tmp_path, plan, given), (os.listdir, run), (Path.read_text, run / "data_report.json")]
    calls += [(command, tmp_path, train_composed, given), (command, tmp_path, plan, [*given, "data.max_tokens=21"])]
    ((planned, names, text, trained, again),) = run_ranks(in_turn, 1, calls)
    assert "train: 5 documents, 39 tokens" in planned
    assert "steps: 1 an epoch of 2 packs" in planned
    assert names == ["data_report.json"]
    assert list(json.loads(text)) == ["train", "steps"]
    assert "step 1/1 | loss " in trained
    assert (run / "global_step_1").is_dir()
    assert "holds a run: its data_report.json is left as it is" in again
    assert json.loads((run / "data_report.json").read_text()) == json.loads(text)
