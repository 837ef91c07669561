"""The audit of `verl-ext show`: numbers equal plain counting, findings name rows; also requirements and bad input."""

import json
from pathlib import Path

import numpy as np
import pytest

from tests.lib.chat_templates import CHATML, tiny_tokenizer
from tests.lib.document_texts import write_lines
from tests.lib.errors import names, refused
from tests.lib.pretrain_files import texts_of, word_tokenizer, write_index, write_jsonl
from tests.lib.shown import audit_of, document, refused_line, show, view, write_data
from tests.lib.tokenized_data import random_documents
from verl_ext.commands.tokenize import main as tokenize
from verl_ext.data import PreTrainDataset, SFTDataSet
from verl_ext.data.packs.options import DataOptions
from verl_ext.options import options_of
from verl_ext.tools.show.packs import PackOptions
from verl_ext.trainer.report import data_facts

CHAT = {"messages": [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": "sat"}]}


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    tiny_tokenizer(CHATML).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_counts_by_category_are_those_of_plain_counting(tmp_path):
    documents = random_documents(np.random.default_rng(0), [*range(2, 60), 0], 50, 2)
    for one in documents:
        one["category_ids"] = one["loss_mask"] * np.int32(1 + len(one["input_ids"]) % 2)
    found = audit_of(tmp_path, write_data(tmp_path / "data", documents))
    for number, name in ((1, "maths"), (2, "code")):
        mine = [d for d in documents if len(d["input_ids"]) % 2 == number - 1 and len(d["input_ids"])]
        lengths = sorted(len(d["input_ids"]) for d in mine)
        row = found["categories"][name]
        assert (row["documents"], row["tokens"]) == (len(mine), sum(lengths))
        assert row["targets"] == sum(int(d["loss_mask"][1:].sum()) for d in mine)
        places = {name: np.percentile(lengths, q, method="inverted_cdf") for name, q in (("p50", 50), ("p99", 99))}
        assert {name: row["length"][name] for name in ("p50", "p99", "max")} == places | {"max": lengths[-1]}
    assert sum(row["share"] for row in found["categories"].values()) == pytest.approx(1)


def test_many_categories_of_long_documents_are_counted_too(tmp_path):
    lengths = [2, 1 << 17] + [3 + n % 7 for n in range(298)]  # more per category than fit in one array
    documents = [document([7] * length, [1], 1 + n % 150) for n, length in enumerate(lengths)]
    found = audit_of(tmp_path, write_data(tmp_path / "data", documents), "scan=false")["categories"]
    for number, row in enumerate(found.values()):
        mine = sorted(lengths[number::150])
        assert (row["documents"], row["tokens"], row["targets"]) == (2, sum(mine), 2)
        assert [row["length"][name] for name in ("p50", "p99", "max")] == [mine[0], mine[1], mine[1]]


def rows_of(findings):
    return {name: [row for _, row in found["rows"]] for name, found in findings.items() if found["count"]}


def test_findings_name_their_rows(tmp_path):
    documents = [
        document([5, 6, 7, 8], [2, 3]),
        document([5, 6, 7], []),  # no target: a marked first token does not count
        document([5, 6, 7, 9], [1, 2, 3]),  # only targets
        document([5, 6, 7, 8], [3]),  # the tokens of row 0
        document([5, 6, 7, 8, 0], [3]),
    ]
    documents[1]["loss_mask"][0] = 1
    folder = write_data(tmp_path / "data", documents)
    val = write_data(tmp_path / "val", [document([1, 2], [1]), document([5, 6, 7, 9], [3])])
    found = audit_of(tmp_path, folder, f"val={val}")["findings"]
    assert rows_of(found) == {"no_target": [1], "all_targets": [2], "duplicates": [3], "leaked": [1]}
    assert found["leaked"]["rows"][0][0] == val
    assert found["duplicates"]["share"] == pytest.approx(1 / 5)


def test_a_tokenized_folder_tells_turns_without_end_and_fields_that_nothing_read(tmp_path, tokenizer):
    longer = {"messages": [*CHAT["messages"], *CHAT["messages"]], "extra": 1}
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(record) + "\n" for record in (CHAT, longer)))
    (tmp_path / "open.jinja").write_text(CHATML.replace("<|im_end|>", "{% if not loop.last %}<|im_end|>{% endif %}"))
    words = [f"sources={{chat:{tmp_path / 'in.jsonl'}}}", f"output_dir={tmp_path / 'out'}", f"model.path={tokenizer}"]
    assert tokenize([*words, f"chat_template={tmp_path / 'open.jinja'}", "end_of_chat=none"]) == 0
    found = audit_of(tmp_path, tmp_path / "out")
    rows = rows_of(found["findings"])
    assert rows == {"no_end": [0, 1], "open_turns": [], "unused_fields": []}
    assert found["findings"]["unused_fields"]["details"] == {"extra": 1}
    assert found["tokenizer"] == str(tokenizer)


def test_texts_that_were_cut_are_found(tmp_path):
    texts = write_jsonl(tmp_path / "web.jsonl", texts_of([3, 9]))
    (folder,) = PreTrainDataset(word_tokenizer(), texts, 8, cache_dir=str(tmp_path / "cache")).folders
    findings = audit_of(tmp_path, folder)["findings"]
    assert {name: [row for _, row in findings[name]["rows"]] for name in ("cut", "cut_in_target")} == {
        "cut": [1],
        "cut_in_target": [1],
    }


def test_bos_twice_empty_reasoning_and_another_tokenizer_are_found(tmp_path, tokenizer):
    other = tiny_tokenizer(
        CHATML, special_tokens=("<think>", "</think>", "<s>", "<|im_start|>", "<|im_end|>", "<|endoftext|>")
    )
    other.save_pretrained(tmp_path / "other")
    bos = other.bos_token_id
    empty = other("<think>\n\n</think>", add_special_tokens=False)["input_ids"]
    documents = [document([bos, bos, 30], [2]), document([30, *empty, 31], [*range(1, len(empty) + 1)])]
    documents.append(document([30, *empty, 31], [len(empty) + 1]))  # shown, but no targets
    folder = write_data(tmp_path / "data", documents, {"tokenizer": str(tokenizer)})
    found = audit_of(tmp_path, folder, f"model.path={tmp_path / 'other'}")["findings"]
    assert [row for _, row in found["double_bos"]["rows"]] == [0]
    assert [row for _, row in found["empty_reasoning"]["rows"]] == [1]
    assert found["other_tokenizer"]["count"] == 3
    same = audit_of(tmp_path, folder, f"model.path={tokenizer}")["findings"]
    assert same["other_tokenizer"]["count"] == 0


def test_targets_by_kind_of_the_report_are_shown(tmp_path):
    report = {"target_kinds": {"maths": {"answer": 30, "reasoning": 10}}}
    folder = write_data(tmp_path / "data", [document([1, 2, 3], [2])], report)
    assert audit_of(tmp_path, folder)["categories"]["maths"]["kinds"] == {"answer": 30, "reasoning": 10}
    assert "30 (75%)" in show(folder)[1]


def test_packs_are_planned_with_the_defaults_of_a_training_run(tmp_path):
    shown, trained = options_of(PackOptions), options_of(SFTDataSet.Options) | options_of(DataOptions)
    common = shown.keys() & trained.keys() - {"max_tokens"}
    assert common >= {"over_length", "strategy", "seed", "mixture", "train_batch_size"}
    assert {name: shown[name].default for name in common} == {name: trained[name].default for name in common}
    folder = write_data(tmp_path / "data", random_documents(np.random.default_rng(1), [3, 65], 50, 2))
    with refused("data.max_tokens", "1 of 2") as raised:
        SFTDataSet(folder, max_tokens=64)
    code, shown, errors = show(folder, "max_tokens=64")  # the audit, and what to set
    assert (code, errors) == (1, f"error: {str(raised.value).replace('data.train_dir', 'paths')}\n")
    assert "2 documents, 68 tokens" in shown
    assert show(folder, "max_tokens=64", "pack=0") == (1, "", errors)


@pytest.mark.parametrize("over_length", ["drop", "truncate", "split"])
def test_packs_are_those_of_the_trainer(tmp_path, over_length):
    folder = write_data(tmp_path / "data", random_documents(np.random.default_rng(1), range(2, 90), 50, 2))
    plan = audit_of(tmp_path, folder, "max_tokens=64", f"over_length={over_length}", "ranks=2", "seed=3")["plan"]
    facts = data_facts(SFTDataSet(folder, max_tokens=64, over_length=over_length, seed=3))
    assert all(plan[name] == facts[name] for name in ("packs", "tokens", "fill"))
    assert plan["documents_over"] == 25
    assert 0 < plan["busy"] <= 1


def test_a_mixture_draws_what_the_trainer_would(tmp_path):
    folder = write_data(tmp_path / "data", random_documents(np.random.default_rng(1), range(2, 90), 50, 2))
    mixture = {"sources": {"short": {"tokens": 900, "intervals": [1, 20, 40]}}}
    words = ("max_tokens=128", "mixture={sources:{short:{tokens:900,intervals:[1,20,40]}}}")
    plan = audit_of(tmp_path, folder, *words)["plan"]
    dataset = SFTDataSet(folder, max_tokens=128, mixture=mixture)
    assert plan["packs"] == len(dataset)
    assert [row["tokens_given"] for row in plan["mixture"]] == [row.tokens_given for row in dataset.mixture_report]


def test_megatron_corpora_are_audited(tmp_path):
    write_index(tmp_path / "books", [range(3)] * 3)
    found = audit_of(tmp_path, tmp_path / "books")
    assert (found["documents"], found["tokens"], found["targets"]) == (3, 9, 6)
    assert found["findings"]["duplicates"]["count"] == 2
    code, shown, errors = show(tmp_path / "books", "max_tokens=8")  # no family packs such documents
    assert (code, errors.count("\n")) == (1, 1)
    assert "paths" in errors
    assert "3 documents" in shown


def test_corpora_of_one_folder_have_the_counts_and_the_masks_that_tokenize_wrote(tmp_path, tokenizer):
    bad = {"messages": [{"role": "user", "content": "the cat"}]}
    sources = {"one": [CHAT, bad], "two": [CHAT] * 3}
    files = {name: write_lines(tmp_path / f"{name}.jsonl", records) for name, records in sources.items()}
    given = [f"sources.{name}={file}" for name, file in files.items()]
    words = [f"model.path={tokenizer}", f"output_dir={tmp_path / 'out'}", "format=megatron", "on_bad_record=skip"]
    assert tokenize([*given, *words]) == 0
    assert "3 targets" in show(tmp_path / "out" / "one", "row=0")[1]  # the answer, two tokens, and its end
    found = audit_of(tmp_path, tmp_path / "out" / "one", tmp_path / "out" / "two", "scan=true")
    assert found["targets"] == 3 * 4
    assert {name: row["targets"] for name, row in found["categories"].items()} == {"one": 3, "two": 9}
    assert [sum(row["kinds"].values()) for row in found["categories"].values()] == [3, 9]
    bad_records = found["findings"]["bad_records"]
    assert (bad_records["count"], bad_records["of"]) == (1, 5)
    found = audit_of(tmp_path, tmp_path / "out" / "two")
    assert (found["findings"]["bad_records"]["count"], found["findings"]["bad_records"]["of"]) == (0, 3)


def test_corpora_of_one_name_are_two_categories(tmp_path):
    numbers = {"a": 2, "b": 5}
    paths = [write_index(tmp_path / folder / "books", [range(3)] * number) for folder, number in numbers.items()]
    found = audit_of(tmp_path, *paths)
    assert [(name, row["documents"]) for name, row in found["categories"].items()] == [(paths[0], 2), (paths[1], 5)]
    assert names(refused_line(paths[0], paths[0], code=1), "paths", "once")


def test_raw_files_of_one_name_are_all_read(tmp_path, tokenizer):
    paths = [tmp_path / folder / name for folder, name in (("a", "x.jsonl"), ("b", "x-2.jsonl"), ("c", "x.jsonl"))]
    for path in paths:
        path.parent.mkdir()
        write_lines(path, [CHAT])
    found = audit_of(tmp_path, *paths, f"model.path={tokenizer}")
    assert (found["documents"], list(found["categories"])) == (3, ["x", "x-2", "x-3"])


def test_requirements_decide_the_exit_code(tmp_path):
    folder = write_data(tmp_path / "data", [document([1, 2, 3], [2]), document([1, 2, 3], []), document([4, 5], [1])])
    view(folder, "require=no_target<=1,duplicates<40%")
    code, _, errors = show(folder, "require=no_target=0,duplicates<40%")
    assert code == 1
    assert names(errors, "no_target=0", "1 of 3")
    assert "duplicates" not in errors
    code, _, errors = show(folder, "require=duplicates=0", "scan=false")
    assert code == 1
    assert names(errors, "duplicates", "not checked")
    for words in ("require=no_targets=0", "require=no_target"):
        assert show(folder, words)[0] == 2


def test_bad_input_is_one_line(tmp_path, tokenizer):
    (tmp_path / "text.txt").write_text("no data")
    folder = write_data(tmp_path / "data", [document([1, 2, 3], [2])], {"total": {"records": 1}})
    (tmp_path / "broken").mkdir()
    for code, key, *words in (
        (2, "model.path", tmp_path / "text.txt"),
        (1, "error: paths", tmp_path / "broken"),
        (1, "error: paths", tmp_path / "missing"),
        (2, "row", folder, "row=1", f"model.path={tokenizer}"),
        (2, "matches", folder, "matches=("),
        (2, "nearest: longest", folder, "lonest=true"),
        (2, "max_tokens", folder, "ranks=8"),
        (2, "max_tokens", folder, "over_length=split"),
        (2, "step", folder, "step=3"),
        (2, "one order", folder, "longest", "shortest"),
        (2, "model.path", folder, "longest"),
        (1, "data.max_tokens", folder, "max_tokens=2", "over_length=error"),
    ):
        assert names(refused_line(*words, code=code), key)
    (Path(folder) / "report.json").write_text("[1]")
    assert names(refused_line(folder, code=1), "report.json")
