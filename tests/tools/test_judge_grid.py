"""`verl-ext grid`: judgements of several seeds in one table."""

import json

import pytest

from tests.lib.document_texts import write_lines
from tests.lib.errors import names
from verl_ext.__main__ import main


def _judged(folder, **means):
    """Write a judgement with the means of each model by group."""
    folder.mkdir()
    models = {
        name: {"figures": {group: {"S_l": {"mean": mean, "low": None, "high": None}} for group, mean in of.items()}}
        for name, of in means.items()
    }
    (folder / "results.json").write_text(json.dumps({"models": models}))
    return str(folder)


@pytest.fixture
def seeds(tmp_path):
    return [
        _judged(tmp_path / "a", none={"all": 50, "length 20": 60}, all={"all": 70, "length 20": 64}),
        _judged(tmp_path / "b", none={"all": 40, "length 20": 60}, all={"all": 60, "length 20": 62}, half={"all": 55}),
        _judged(tmp_path / "c", none={"all": 30, "length 20": 60}),
    ]


def test_differences_are_taken_within_a_seed_and_a_missing_cell_counts_for_no_seed(seeds, tmp_path, capsys):
    given = [f"judged=[{','.join(seeds)}]", "score=S_l", "base=none", f"output_dir={tmp_path}/out"]
    assert main(["grid", *given]) == 0
    found = json.loads((tmp_path / "out" / "grid.json").read_text())
    assert found["models"]["none"]["all"] == pytest.approx(
        {"mean": 40, "low": 15.16, "high": 64.84, "cases": 3}, abs=0.01
    )
    # The seeds differ by ten, and the difference between the models by nothing.
    difference = found["differences to none"]["all"]
    assert difference["all"] == {"mean": 20, "low": 20, "high": 20, "cases": 2}
    assert difference["length 20"] == pytest.approx(
        {"mean": 3, "low": 3 - 12.706, "high": 3 + 12.706, "cases": 2}, abs=0.01
    )
    assert found["differences to none"]["half"] == {"all": {"mean": 15, "low": None, "high": None, "cases": 1}}
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "S_l: means over 3 seeds, 95 % t intervals over the seeds (of all 2, half 1 alone)"
    assert next(line for line in lines if line.startswith("difference to none")).split()[3:] == ["all", "length", "20"]
    assert [line.split() for line in lines if line.startswith("half")][-1] == ["half", "15.00", "–"]


def test_a_case_without_a_score_counts_in_no_difference(tmp_path, capsys):
    cases = write_lines(tmp_path / "cases.jsonl", [{"prompt": p, "type": "t", "length": 100} for p in "abc"])
    answers = {"one": {"a": 100, "b": 50}, "two": {"a": 100, "b": 50, "c": 100}, "three": {"a": 100, "c": 100}}
    words = [f"cases={cases}", "task=longwrite_ruler", "max_failed=1", f"output_dir={tmp_path / 'judged'}"]
    for name, lengths in answers.items():
        rows = [{"prompt": prompt, "response": "word " * length} for prompt, length in lengths.items()]
        words.append(f"predictions.{name}={write_lines(tmp_path / f'{name}.jsonl', rows)}")
    assert main(["judge", *words]) == 0
    given = [f"judged=[{tmp_path / 'judged'}]", "score=words", f"output_dir={tmp_path / 'out'}", "overwrite=true"]
    for base, other in (("one", "two"), ("two", "one")):
        capsys.readouterr()
        code = main(["grid", *given, f"base={base}"])
        if base == "one":
            table = json.loads((tmp_path / "out" / "grid.json").read_text())[f"differences to {base}"]
            assert (code, table[other]["all"]["mean"], table["three"]["all"]["mean"]) == (0, 0, 0)
    assert code == 1
    assert names(capsys.readouterr().err, "base", "two")


@pytest.mark.parametrize(
    ("given", "things"),
    [
        (["base=nobody"], ("base", "none, all, half", "nobody")),
        (["judged=[a,b,./a]"], ("judged", "./a", "twice")),
        (["score=S_q"], ("score", "S_q")),
        (["judged=[nowhere]"], ("judged", "nowhere", "results.json")),
    ],
)
def test_mistakes_are_one_line(seeds, tmp_path, capsys, given, things):
    words = {"judged": f"[{','.join(seeds)}]", "score": "S_l", "output_dir": tmp_path / "out"}
    words |= dict(word.split("=", 1) for word in given)
    assert main(["grid", *(f"{key}={value}" for key, value in words.items())]) in (1, 2)
    assert names(capsys.readouterr().err, *things)
