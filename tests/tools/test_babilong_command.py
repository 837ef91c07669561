"""`verl-ext babilong`: files, reproducibility, refusals, exit codes."""

import json
import signal
from pathlib import Path

import pytest

from tests.lib.babilong_data import ANY_FACT, replay
from tests.lib.babilong_tokenizers import byte_level, words
from tests.lib.errors import names
from verl_ext.tools.babilong import command
from verl_ext.tools.babilong.samples import SampleMaker

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    byte_level().save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def _in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signal, "signal", lambda *_: None)


def run(output: Path, model: Path, *overrides: str) -> int:
    return command.main([f"output_dir={output}", f"model.path={model}", "num_workers=1", *overrides])


def generate(output: Path, model: Path, *overrides: str) -> None:
    """Run with a smaller background than usual, which is counted faster, and with jobs of a few samples."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command, "FILLER_SENTENCES", 500)
        patch.setattr(command, "JOB_TOKENS", 400)
        assert run(output, model, *overrides) == 0


def test_every_task_and_size_becomes_a_file_of_the_published_layout(tmp_path: Path, model: Path) -> None:
    output = tmp_path / "data"
    generate(output, model, "tasks=[qa1,qa5]", "sizes=[0k,1k,600]", "samples=7")
    names = sorted(path.relative_to(output).as_posix() for path in output.rglob("*.json"))
    assert names == [f"{task}/{size}.json" for task in ("qa1", "qa5") for size in ("0k", "1k", "600")]
    for path in output.rglob("*.json"):
        records = json.loads(path.read_text(encoding="utf-8"))
        assert len(records) == 7
        for record in records:
            assert list(record) == ["input", "question", "target"]
            facts = [match[0] for match in ANY_FACT.finditer(record["input"])]
            assert replay(facts, record["question"]) == record["target"]


def test_a_seed_gives_the_same_bytes_for_any_workers_samples_and_sizes(tmp_path: Path, model: Path) -> None:
    overrides = ("tasks=[qa1,qa3]", "sizes=[0k,1k]", "samples=10")
    for name, more in (("one", "num_workers=1"), ("two", "num_workers=2"), ("other", "seed=1")):
        generate(tmp_path / name, model, *overrides, more)
    generate(tmp_path / "few", model, "tasks=[qa2,qa1]", "sizes=[2k,1k]", "samples=3")  # leaves a sample as it is
    few, many = (json.loads((tmp_path / name / "qa1/1k.json").read_text()) for name in ("few", "one"))
    assert few == many[:3]
    one, two, other = (
        {str(path.relative_to(tmp_path / name)): path.read_bytes() for path in (tmp_path / name).rglob("*.*")}
        for name in ("one", "two", "other")
    )
    assert one == two
    assert set(one) == set(other)
    assert all(one[name] != other[name] for name in one)


def test_background_of_a_folder_is_used_and_described(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words().save_pretrained(tmp_path / "words")
    (tmp_path / "text/deep").mkdir(parents=True)
    text = " ".join(f"Sentence {n} of a book that goes on and on like this." for n in range(100))
    (tmp_path / "text/deep/a.txt").write_text(text)
    generate(tmp_path / "out", tmp_path / "words", "sizes=[500]", "samples=2", f"background={tmp_path / 'text'}")
    for record in json.loads((tmp_path / "out/qa1/500.json").read_text()):
        assert len(record["input"].split()) == 200
        assert "of a book that goes on and on" in record["input"]
    assert "background of 1,176 tokens; of 98 sentences with a label of the task: qa1 0" in capsys.readouterr().out


REFUSED = [
    ("tasks=[qa6]", ("tasks", "qa4, qa5", "stories", "qa6")),
    ("tasks=[qa21]", ("tasks", "qa1, qa2", "qa21")),
    ("stories=missing", ("stories", "missing")),
    ("sizes=[1x]", ("sizes", "1x")),
    ("sizes=[1k,1k]", ("sizes", "twice", "['1k', '1k']")),
    ("sizes=[200]", ("sizes", "reserve_tokens (300)", 200)),
    ("sizes=[1k,310]", ("sizes", "question 5 of a qa1 story", "10 facts", "size 310")),
    ("sizes=[2k,301]", ("sizes", "0 facts in 0 tokens", "size 301", "reserve_tokens 300")),
    ("story.max_facts=3", ("story.max_facts", "question 5 of a qa1 story", "10 facts")),
    ("facts_within=0", ("facts_within", "got 0")),
    ("facts_within=[5,5]", ("facts_within", "[5, 5]")),
    ("model.path=null", ("model.path", "nothing")),
    ("background=missing", ("background", "missing")),
]


@pytest.mark.parametrize(("override", "things"), REFUSED, ids=[override for override, _ in REFUSED])
def test_a_mistake_is_one_line_before_a_sample_is_made(override, things, tmp_path, model, capsys, monkeypatch):
    monkeypatch.setattr(SampleMaker, "sample", None)
    assert run(tmp_path / "out", model, "samples=9", override) == 2
    (line,) = [text for text in capsys.readouterr().err.splitlines() if text.startswith("error: ")]
    assert names(line, *things), line
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "content", "thing"),
    [
        ("a.md", b"Text.", "0 .txt files"),
        ("a.txt", b"One. Two. Three.", "1 .txt files"),
        ("a.txt", b"Good. \xff\xfe bad.", "byte 6"),
    ],
    ids=["no .txt", "short sentences", "not UTF-8"],
)
def test_unusable_background_is_refused(name, content, thing, tmp_path, model, capsys):
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / name).write_bytes(content)
    assert run(tmp_path / "out", model, "sizes=[1k]", f"background={tmp_path / 'text'}") == 2
    assert names(capsys.readouterr().err.splitlines()[-1], "background", thing)
    assert not (tmp_path / "out").exists()


def test_what_is_there_is_replaced_only_where_asked_and_by_a_complete_run(tmp_path, model, capsys, monkeypatch):
    output = tmp_path / "out"
    assert run(output, model, "samples=2") == 0
    before = (output / "qa1/0k.json").read_bytes()
    assert run(output, model, "samples=3") == 2
    assert names(capsys.readouterr().err, "output_dir", "overwrite=true", output)
    with monkeypatch.context() as patch:
        patch.setattr(SampleMaker, "sample", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        assert run(output, model, "samples=3", "overwrite=true") == 130
    assert (output / "qa1/0k.json").read_bytes() == before
    assert run(output, model, "samples=3", "tasks=[qa2]", "overwrite=true") == 0
    assert sorted(path.name for path in output.iterdir()) == [command.MARKER, "qa2"]
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
