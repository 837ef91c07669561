"""`verl-ext judge`, from cases to results.json, with a server and a judge that answer over HTTP."""

import functools
import json
import re
from collections import Counter

import pytest
import vl_convert
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.lib.chat_server import chat_server, completion
from tests.lib.errors import names
from verl_ext.__main__ import main
from verl_ext.tools.endpoint.quality import DIMENSIONS
from verl_ext.tools.judging.recall import BABILong

pytestmark = pytest.mark.slow

CASES = [
    {"prompt": "a story of 100 words", "type": "Story", "length": 100},
    {"prompt": "an essay of 200 words", "type": "Essay", "length": 200},
]

NEEDLE = ("needle.text=The key is 7421.", "needle.question=What is the key?", "needle.expected=['7421']")


@pytest.fixture
def cases(tmp_path):
    path = tmp_path / "longbench_write.jsonl"
    path.write_text("\n".join(map(json.dumps, CASES)))
    return path


@pytest.fixture
def judged(tmp_path, cases):
    """Return a function that judges by words of the command, and returns the result of each model."""

    def judged(*given, task="longbench_write", code=0):
        words = {"task": task, "cases": cases, "output_dir": tmp_path / "out"}
        words |= dict(word.split("=", 1) for word in given)
        assert main(["judge", *(f"{key}={value}" for key, value in words.items())]) == code
        return json.loads((tmp_path / "out" / "results.json").read_text())["models"]

    return judged


def _model(server):
    return f"endpoint.base_url={server.url}", "endpoint.model=m"


def _judge(server):
    return f"judge.base_url={server.url}", "judge.model=gpt"


def _predictions(tmp_path, **words):
    """Write predictions of so many words for each case, by name, and return the option that names their files."""
    for name, count in words.items():
        rows = [{**case, "response": "word " * count} for case in CASES]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return f"predictions={{{','.join(f'{name}:{tmp_path}/{name}.jsonl' for name in words)}}}"


def _good_judge(request):
    return json.dumps({"Analysis": "fine", **dict.fromkeys(DIMENSIONS, 4)})


def test_an_endpoint_is_judged_and_a_second_run_asks_nobody(judged, tmp_path, capsys):
    asked = Counter()

    def model(request):
        asked["model"] += 1
        assert request["temperature"] == 0.5
        assert request["max_tokens"] == 32768
        return completion("word " * 100, "length" if "essay" in request["messages"][0]["content"] else "stop")

    def judge(request):
        asked["judge"] += 1
        (message,) = request["messages"]
        assert "word word" in message["content"]
        return _good_judge(request)

    with chat_server(model) as server, chat_server(judge) as judge_server:
        judged(*_model(server), *_judge(judge_server))
        assert "S_q_imputed" in capsys.readouterr().out
        found = judged(*_model(server), *_judge(judge_server), "overwrite=true")["m"]
    assert asked == {"model": 2, "judge": 2}
    assert found["figures"]["all"]["S_l"]["mean"] == pytest.approx(75)
    assert found["figures"]["all"]["S_q"]["mean"] == 75
    assert found["figures"]["type Essay"]["S_l"]["mean"] == 50
    assert found["outcomes"] == {"done": 1, "cut": 1}
    published = [json.loads(line) for line in (tmp_path / "out" / "m" / "pred.jsonl").read_text().splitlines()]
    assert [{name: row[name] for name in CASES[0]} for row in published] == CASES
    assert [row["response_length"] for row in published] == [100, 100]
    answers = [json.loads(line) for line in (tmp_path / "out" / "m" / "answers.jsonl").read_text().splitlines()]
    assert json.loads(answers[0]["judge"][0]["verdict"])["Analysis"] == "fine"


def _charts(folder):
    """Return a page's figures by title, each drawn by vega-lite without a browser."""
    data = json.loads(re.search(r'id="data">(.*?)</script>', (folder / "page.html").read_text())[1])
    for chart in data["charts"]:
        svg = vl_convert.vegalite_to_svg({**chart["spec"], "width": 300, "data": {"values": chart["values"]}})
        assert "<path" in svg
    return {chart["title"]: chart["values"] for chart in data["charts"]}


def test_the_page_has_figures_with_intervals_side_by_side_and_the_judges_raw_texts(judged, tmp_path):
    script = "<script>alert(1)</script>"
    predictions = _predictions(tmp_path, short=50, exact=100)
    for name in ("short", "exact"):
        path = tmp_path / f"{name}.jsonl"
        path.write_text(path.read_text().replace('"response": "', f'"response": "{script} '))
    with chat_server(lambda request: f"{script} {_good_judge(request)}") as server:
        models = judged(predictions, *_judge(server))
    charts = _charts(tmp_path / "out")
    assert list(charts) == ["S_bar", "S_bar by type", "S_l", "S_l by type", "S_q", "S_q by type"]
    figures = {name: of["figures"]["all"]["S_l"] for name, of in models.items()}
    assert {row.pop("model"): row for row in charts["S_l"]} == {n: {"group": "", **f} for n, f in figures.items()}
    page = (tmp_path / "out" / "page.html").read_text()
    assert "<script>alert" not in page
    assert page.count("verdict 1, done") == 4
    assert page.count("&#34;Analysis&#34;: &#34;fine&#34;") == 4
    assert "<summary>case 2</summary>" in page


def test_the_ruler_is_drawn_as_words_written_over_words_asked_for(judged, tmp_path):
    judged(_predictions(tmp_path, a=100), task="longwrite_ruler")
    points = _charts(tmp_path / "out")["words written over words asked for"]
    assert [(point["asked"], point["is"]) for point in points] == [(100, 100), (200, 100)]


def test_what_is_spent_is_printed_for_each_server_by_its_prices(judged, tmp_path, cases, capsys):
    file = tmp_path / "prices.yaml"
    file.write_text("m: {input: 1000, output: 10000}\ngpt: {input: 0, output: 100000}\n")
    with chat_server(lambda request: "word " * 100) as server, chat_server(_good_judge) as judge_server:
        given = [*_model(server), *_judge(judge_server), f"endpoint.prices={file}", f"judge.prices={file}"]
        judged(*given)
        printed = capsys.readouterr()
        assert re.search(r"^m: 2 requests.* 20 prompt tokens .* cost 0\.12$", printed.out, re.MULTILINE)
        assert re.search(r"^judge gpt: 2 requests.* 10 written, cost 1\.00$", printed.out, re.MULTILINE)
        assert re.search(r"2/2, .* requests/s, 60\.00 tokens, cost 1\.12, ", printed.err)
        file.write_text("m: {input: 1, output: 1}\ngpt: {inptu: 0, output: 100000}\n")
        judged(*given, "overwrite=true", code=2)
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error")]
    assert names(line, "judge.prices.gpt", "inptu")


def test_predictions_of_other_programs_are_judged_side_by_side(judged, tmp_path, capsys):
    models = judged(_predictions(tmp_path, short=50, exact=100))
    assert models["short"]["figures"]["all"]["S_l"]["mean"] == pytest.approx((50 + 0) / 2)
    assert models["exact"]["figures"]["all"]["S_l"]["mean"] == pytest.approx((100 + 50) / 2)
    assert "S_q" not in models["exact"]["figures"]["all"]
    assert "exact" in capsys.readouterr().out.splitlines()[0]


def test_a_case_that_had_no_answer_before_is_none_when_judged_again(judged, tmp_path, capsys):
    rows = [{"case": "1", "answer": "word " * 100, "outcome": "done"}, {"case": "2", "answer": "", "outcome": "failed"}]
    (tmp_path / "answers.jsonl").write_text("\n".join(map(json.dumps, rows)))
    found = judged(f"predictions.a={tmp_path}/answers.jsonl", code=1)["a"]
    assert "1 of 2 cases of a" in capsys.readouterr().err
    assert found["figures"]["all"]["S_l"] == {"mean": 100, "low": None, "high": None, "cases": 1}
    assert found["outcomes"] == {"done": 1, "failed": 1}


def test_empty_and_refused_answers_count_as_no_words_wherever_they_come_from(judged, tmp_path):
    def model(request):
        return completion("", refusal="No.") if "essay" in request["messages"][0]["content"] else ""

    rows = [{"case": str(number), "answer": "", "outcome": o} for number, o in enumerate(("done", "refused"), 1)]
    (tmp_path / "answers.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with chat_server(model) as server, chat_server(_good_judge) as judge_server:
        file = f"predictions.file={tmp_path}/answers.jsonl"
        models = judged(*_model(server), *_judge(judge_server), file)
        assert not judge_server.requests
    for model_of in models.values():
        assert model_of["outcomes"] == {"unparsable": 1, "refused": 1}
        means = {name: figure["mean"] for name, figure in model_of["figures"]["all"].items()}
        assert set(means.values()) == {0}
        assert {"S_l", "S_q", "S_q_imputed", "S_bar"} <= set(means)
        assert model_of["figures"]["all"]["S_l"]["cases"] == 2


def test_unreadable_verdicts_are_asked_for_five_times_counted_apart_and_end_with_exit_code_1(judged, tmp_path, capsys):
    asked = Counter()

    def judge(request):
        essay = "an essay" in request["messages"][0]["content"]
        asked[essay] += 1
        return "I liked it." if essay else _good_judge(request)

    predictions = _predictions(tmp_path, a=100)
    with chat_server(judge) as server:
        found = judged(predictions, *_judge(server), code=1)["a"]
    error = capsys.readouterr().err.splitlines()[-1]
    assert "1 of 2 cases of a" in error
    assert "max_failed=0" in error
    assert asked == {True: 5, False: 1}
    assert found["outcomes"] == {"done": 1, "verdict unparsable": 1}
    assert found["figures"]["all"]["S_q"] == {"mean": 75, "low": None, "high": None, "cases": 1}
    assert found["figures"]["all"]["S_q_imputed"]["mean"] == pytest.approx((75 + 50) / 2)
    with chat_server(judge) as server:
        judged(predictions, *_judge(server), "overwrite=true", "max_failed=0.5")
    assert asked == {True: 5, False: 1}  # unreadable verdicts cost as much


def test_longbench_chat_gives_the_mean_and_the_codes_sum(judged, tmp_path):
    cases = [{"idx": i, "prompt": f"doc {i}", "query": f"why {i}?", "answer": f"because {i}"} for i in (1, 2)]
    shots = [[{"answer": f"shot {i}{k}", "score": k + 1} for k in range(3)] for i in (1, 2)]
    for name, value in (("cases", cases), ("shots", shots)):
        (tmp_path / f"{name}.json").write_text(json.dumps(value))
    ratings = iter([6, 8, 3, 3])
    given = [f"cases={tmp_path}/cases.json", f"chat.shots={tmp_path}/shots.json", "chat.ratings=2"]
    with (
        chat_server(lambda request: "an answer") as server,
        chat_server(lambda request: f"Rating: [[{next(ratings)}]]") as judge_server,
    ):
        more = [*_model(server), *_judge(judge_server), "chat.shuffle_shots=true"]
        found = judged(*given, *more, task="longbench_chat")["m"]
    assert found["figures"]["all"]["rating"]["mean"] == 5
    assert found["sums"]["rating"] == 10


def test_the_difference_of_two_models_has_an_interval_of_the_same_cases(tmp_path, capsys):
    """Scores of cases differ widely, and one model's are always a little better."""
    cases = [{"prompt": f"{n} words", "type": "T", "length": n} for n in (100, 200, 400, 800)] * 3
    words = {"low": [40, 120, 150, 500] * 3, "high": [42, 126, 157, 525] * 3}
    (tmp_path / "cases.jsonl").write_text("\n".join(map(json.dumps, cases)))
    for name, counts in words.items():
        rows = [{**case, "response": "word " * count} for case, count in zip(cases, counts, strict=True)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    given = {"task": "longwrite_ruler", "cases": tmp_path / "cases.jsonl", "output_dir": tmp_path / "out"}
    given["predictions"] = f"{{low:{tmp_path}/low.jsonl,high:{tmp_path}/high.jsonl}}"
    assert main(["judge", *(f"{key}={value}" for key, value in given.items())]) == 0
    found = json.loads((tmp_path / "out" / "results.json").read_text())
    difference = found["differences"]["high - low"]["all"]["share"]
    each = [(b - a) / case["length"] for case, a, b in zip(cases, words["low"], words["high"], strict=True)]
    assert difference["mean"] == pytest.approx(sum(each) / len(each))
    assert min(each) <= difference["low"] <= difference["mean"] <= difference["high"] <= max(each)
    low, high = (found["models"][name]["figures"]["all"]["share"] for name in words)
    assert low["high"] > high["low"]  # the models' own intervals overlap
    assert difference["low"] > 0
    assert found["differences"]["high - low"]["length 100"]["share"]["cases"] == 3
    assert "high - low" in capsys.readouterr().out
    assert "high - low" in (tmp_path / "out" / "page.html").read_text()


def test_a_judge_rates_a_needle_by_criteria_beside_the_words_and_ratings_of_a_chat_have_a_spread(
    judged, tmp_path, tiny_model
):
    (tmp_path / "hay.txt").write_text("It rains. " * 400)
    given = (f"cases={tmp_path / 'hay.txt'}", f"model.path={tiny_model}", *NEEDLE)
    given += ("needle.lengths=[100]", "needle.depths=[10,90]")

    def rate(request):
        content = request["messages"][0]["content"]
        assert "What is the key?" in content
        assert "The key is 7421." in content
        assert "It rains" not in content
        return "10" if "It is 7421" in content else "It is wrong. [[1]]"

    answers = iter(["It is 7421.", "I do not know."])
    with chat_server(lambda _: next(answers)) as server, chat_server(rate) as judge_server:
        figures = judged(*given, *_model(server), *_judge(judge_server), task="needle")["m"]["figures"]
    assert (figures["all"]["rating"]["mean"], figures["all"]["found"]["mean"]) == (5.5, 0.5)


PROMPTS = """
DEFAULT_TEMPLATE = '{instruction}|{examples}|{post_prompt}|{context}|{question}'
raise SystemExit("executed")
DEFAULT_PROMPTS = {'qa1': {'instruction': 'Read ' 'on.', 'examples': 'E {context}', 'post_prompt': 'P'}}
"""


def test_babilong_is_asked_by_its_published_prompts_and_has_a_table_by_length_and_task(judged, tmp_path, capsys):
    for size in ("0k", "4k"):
        (tmp_path / "data" / "qa1").mkdir(parents=True, exist_ok=True)
        rows = [{"input": f"Facts {size}. ", "question": "Where is Mary?", "target": "hallway"}] * 2
        (tmp_path / "data" / "qa1" / f"{size}.json").write_text(json.dumps(rows))
    (tmp_path / "prompts.py").write_text(PROMPTS)
    other = {"qa1": {"instruction": "I", "examples": "E", "post_prompt": "P"}}
    (tmp_path / "prompts.yaml").write_text(json.dumps(other))
    (tmp_path / "bad.yaml").write_text("qa2: {instruction: I, examples: E, post_prompt: P}")
    (tmp_path / "worse.yaml").write_text("qa1: {instruction: I}")
    with chat_server(lambda request: "hallway" if "4k" in str(request) else "garden") as server:
        given = [f"cases={tmp_path / 'data'}", *_model(server), "overwrite=true"]
        figures = judged(*given, f"babilong.prompts={tmp_path}/prompts.py", task="babilong")["m"]["figures"]
        asked = server.requests[-1]["messages"][0]["content"]
        printed = capsys.readouterr().out.splitlines()
        judged(*given, f"babilong.prompts={tmp_path}/prompts.yaml", task="babilong")
        last = server.requests[-1]["messages"][0]["content"]
        for name, missing in (("bad", "qa1"), ("worse", "examples")):
            words = ["task=babilong", *given, f"babilong.prompts={tmp_path}/{name}.yaml", f"output_dir={tmp_path}/x"]
            assert main(["judge", *words]) == 1
            assert missing in capsys.readouterr().err
    assert re.fullmatch(r"Read on\.\|E \{context\}\|P\|Facts \dk\.\s*\|Where is Mary\?", asked)
    assert re.fullmatch(r"I\nE\nP\n<context>\nFacts \dk\.\s*\n</context>\nQuestion: Where is Mary\?", last)
    assert (figures["cell qa1 4k"]["right"]["mean"], figures["cell qa1 4k"]["right_words"]["mean"]) == (1, 1)
    assert (figures["task qa1"]["right"]["mean"], figures["task qa1"]["right"]["cases"]) == (0.5, 4)
    assert [line.split() for line in printed if line.startswith("qa1 ")] == [["qa1", "0.00", "1.00"]]


TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
CHATS = [
    {"question": "2 + 3?", "answer": "It is 2 + 3 = 5.\n#### 5", "kind": "sums"},
    {
        "messages": [
            {"role": "user", "content": "Ask f."},
            {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"n": 1}}}]},
            {"role": "tool", "content": "7"},
            {"role": "assistant", "content": "It says 7."},
        ],
        "tools": TOOLS,
        "enable_thinking": False,
    },
]


def test_the_chats_of_a_runs_eval_prompts_are_asked_of_a_server_and_scored_alike(judged, tmp_path, tiny_model):
    (tmp_path / "maths.jsonl").write_text("\n".join(map(json.dumps, CHATS)))
    words = [f"cases={tmp_path / 'maths.jsonl'}", "eval.score=number", "eval.category_field=kind", "overwrite=true"]
    with chat_server(lambda body: "<think>8</think>#### 5" if "2 + 3" in str(body) else "8") as server:
        extra = "endpoint.extra_body={chat_template_kwargs:{style:plain}}"
        models = judged(*words, *_model(server), f"models.tiny={tiny_model}", extra, "max_tokens=8", task="prompts")
    means = {group: figure["score"]["mean"] for group, figure in models["m"]["figures"].items()}
    assert means == {"all": 0.5, "category sums": 1, "category maths": 0}
    assert set(models) == {"m", "tiny"}
    asked, called = sorted(server.requests, key=lambda body: len(body["messages"]))
    assert asked["messages"] == [{"role": "user", "content": "2 + 3?"}]
    assert called["messages"][1]["tool_calls"][0]["function"]["arguments"] == '{"n": 1}'
    assert (called["tools"], called["chat_template_kwargs"]) == (TOOLS, {"style": "plain", "enable_thinking": False})
    (tmp_path / "own.py").write_text("def half(record, answer):\n    return 0.5 * (record['kind'] == 'sums')\n")
    with chat_server(lambda body: "5") as server:
        own = judged(*words, *_model(server), f"eval.score={tmp_path}/own.py:half", "limit=1", task="prompts")["m"]
    assert own["figures"]["all"]["score"]["mean"] == 0.5


def test_a_needle_is_asked_for_at_every_length_and_depth(judged, tmp_path, tiny_model):
    (tmp_path / "hay.txt").write_text(" ".join(f"Sentence {i} of the hay." for i in range(400)))

    def model(request):
        prompt = request["messages"][0]["content"]
        return "It is 7421." if prompt.index("7421") < len(prompt) / 2 else "I do not know."

    given = (f"cases={tmp_path / 'hay.txt'}", f"model.path={tiny_model}", *NEEDLE)
    given += ("needle.lengths=[100,900]", "needle.depths=[0,100]")
    with chat_server(model) as server:
        figures = judged(*given, *_model(server), task="needle")["m"]["figures"]
    found = {name: of["found"]["mean"] for name, of in figures.items() if name.startswith("cell")}
    assert found == {f"cell {length} at {depth}%": depth == 0 for length in (100, 900) for depth in (0, 100)}
    cells = {(c["across"], c["down"]): c["score"] for c in _charts(tmp_path / "out")["m: found"]}
    assert cells == {(str(length), f"{depth}%"): depth == 0 for length in (100, 900) for depth in (0, 100)}


def test_a_folder_answers_as_plain_transformers_does(judged, tmp_path, tiny_model):
    (tmp_path / "qa1").mkdir()
    rows = [{"input": "John went home.", "question": "Where is John?", "target": "kitchen"}]
    (tmp_path / "qa1" / "0k.json").write_text(json.dumps(rows))
    judged(f"cases={tmp_path / 'qa1'}", f"models.tiny={tiny_model}", "max_tokens=8", task="babilong")
    (answer,) = map(json.loads, (tmp_path / "out" / "tiny" / "answers.jsonl").read_text().splitlines())
    tokenizer, model = (cls.from_pretrained(tiny_model) for cls in (AutoTokenizer, AutoModelForCausalLM))
    (case,) = BABILong(str(tmp_path / "qa1")).cases()
    chat = [{"role": "user", "content": case.prompt}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**inputs, max_new_tokens=8, do_sample=False)[0, inputs["input_ids"].size(1) :]
    assert answer["answer"] == tokenizer.decode(output, skip_special_tokens=True).strip()


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        (["task=longbench"], "task"),
        (["task=longbench_write", "cases=CASES"], "models, predictions or endpoint.base_url"),
        (["task=longbench_write", "cases=nowhere.jsonl", "models.a=x"], "nowhere.jsonl"),
        (["task=longbench_write", "cases=CASES", "models.a=nowhere"], "models.a"),
        (["task=longbench_write", "cases=CASES", "endpoint.base_url=host", "endpoint.model=m"], "endpoint.base_url"),
        (["task=longbench_chat", "cases=CASES", "models.a=x"], "judge.base_url"),
        (["task=needle", "cases=CASES", "models.a=x"], "model.path"),
        (["task=needle", "cases=CASES", "models.a=x", "needle.text=T"], "needle.text"),
        (["task=needle", "cases=CASES", "models.a=x", "needle.depths=[101]"], "needle.depths"),
        (["task=longbench_write", "cases=CASES", "models.a=x", "judge_prompt=nowhere"], "judge_prompt"),
        (["task=longbench_write", "cases=CASES", "predictions.a=nowhere.jsonl"], "predictions.a"),
        (["task=longwrite_ruler", "cases=CASES", "predictions.a=x", "lengths=[9]"], "lengths"),
        (["task=prompts", "cases=CASES", "predictions.a=CASES"], "longbench_write.jsonl:1"),
        (["task=prompts", "cases=CASES", "predictions.a=CASES", "eval.score=exakt"], "eval.score"),
        (["task=prompts", "cases=CASES", "predictions.a=CASES", "eval.columns={mesages:m}"], "eval.columns"),
        (["task=longbench_write", "cases=ZERO", "predictions.a=CASES"], "1 word"),
        (["task=longwrite_ruler", "cases=TRUE", "predictions.a=CASES"], "length (int)"),
    ],
)
def test_a_mistake_is_one_line_that_names_its_key(tmp_path, cases, capsys, arguments, key):
    for name, length in (("ZERO", 0), ("TRUE", True)):
        (tmp_path / name).write_text(json.dumps({"prompt": "x", "type": "t", "length": length}))
    files = {"CASES": cases, "ZERO": tmp_path / "ZERO", "TRUE": tmp_path / "TRUE"}
    given = [functools.reduce(lambda text, name: text.replace(name, str(files[name])), files, a) for a in arguments]
    assert main(["judge", *given, f"output_dir={tmp_path / 'out'}"]) in (1, 2)
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error")]
    assert names(line, key)
    assert not (tmp_path / "out").exists()
