"""Right answers of a validation set by category, counted through the trainer on two ranks with uneven shares."""

import json
from statistics import fmean

import pytest
import torch
from transformers import AutoTokenizer

from tests.lib.ranks import run_ranks
from tests.lib.tiny_model import VOCABULARY, write_tiny_model
from tests.lib.tiny_titans import perturb
from tests.lib.titans_run import TITANS, fresh_model
from tests.lib.training import build
from verl_ext.data.families.babilong import question_prompt
from verl_ext.data.families.babilong_answers import PLACE_LABELS
from verl_ext.titans import save_memory_checkpoint

TEXT = [f"w{word}" for word in range(20, 80)]
GREEDY = None  # this target is the token that the model itself generates
# Category -> a record's (first word of its input, target).
ROWS = {
    "qa1_1k": [("w20", place) for place in PLACE_LABELS[:4]],
    "qa2_1k": [("office", "garden"), ("w20", "kitchen"), ("hallway", "hallway"), ("bedroom", "office")],
    "stories": [("w20", GREEDY), ("<|im_end|>", "w3"), ("w21", GREEDY), ("w22", "w4"), ("w23", GREEDY)],
}
# 13 rows, 4 a step: in the last step, one rank has a row and the other has none.


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A tiny Qwen whose tokenizer has BABILong's places."""
    folder = write_tiny_model(tmp_path_factory.mktemp("model"), vocab_size=VOCABULARY + len(PLACE_LABELS))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(list(PLACE_LABELS))
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def memory(model, tmp_path_factory):
    """Return (a model with an active memory, that memory's file)."""
    titans = perturb(fresh_model(model), scale=1.0).eval()
    path = tmp_path_factory.mktemp("memory") / "memory.pt"
    save_memory_checkpoint(path, titans.memory_state_dict(), 0)
    return titans, path


def _write(folder, model, titans):
    """Write ROWS as JSON files; return the paths, and of each category's rows the tokens and whether the target is the
    likeliest one."""
    tokenizer, greedy, paths = AutoTokenizer.from_pretrained(model), {}, []
    for category, asked in ROWS.items():
        records, likeliest = [], []
        for number, (word, target) in enumerate(asked):
            text = " ".join([word, *TEXT[5 * len(paths) + number :]])  # all prompts differ
            record = {"input": text, "question": "w1 w2"}
            ids = torch.tensor([tokenizer(question_prompt(*record.values()))["input_ids"]])
            said = tokenizer.convert_ids_to_tokens(titans(ids).logits[0, -1].argmax().item())
            assert said not in tokenizer.all_special_tokens
            records.append(record | {"target": target or said})
            likeliest.append((ids.shape[1] + 1, target in (GREEDY, said)))
        greedy[category] = likeliest
        path = folder / f"{category.replace('_', '/')}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(records))
        paths.append(str(path))
    return paths, greedy


def _measure_twice(options):
    """Return the metrics of the model's own answers, and of true ones that go on for two tokens, maybe past the end."""
    trainer = build(options)
    own = trainer.validate()

    dataset, true = trainer.run.validation.dataset, {}
    for row in (dataset[pack] for pack in range(len(dataset))):
        at = int(row["loss_mask"].argmax())
        true[tuple(row["input_ids"][:at].tolist())] = [row["input_ids"][at].item(), *row["input_ids"][:2].tolist()]

    def true_answers(prompts, sampling):
        return [sampling.cut(true.get(tuple(prompt), [])) for prompt in prompts]

    trainer.engine.generate_answers = true_answers
    return own, trainer.validate()


def test_shares_of_right_answers_are_those_of_the_rows(model, memory, tmp_path):
    titans, checkpoint = memory
    paths, likeliest = _write(tmp_path / "data", model, titans)
    greedy = {
        category: sum(is_likeliest for _, is_likeliest in rows) / len(rows) for category, rows in likeliest.items()
    }
    assert 0 < greedy["stories"] < 1
    edge = sorted(tokens for tokens, _ in likeliest["stories"])[2]  # rows of this length are in the first bin
    options = [
        *TITANS,
        *(f"data.train_dir=[{','.join(paths)}]", f"data.val_dir=[{','.join(paths)}]", f"model.path={model}"),
        *(f"data.cache_dir={tmp_path / 'cache'}", f"model.memory_checkpoint={checkpoint}", "trainer.answer_tokens=1"),
        *("trainer.eval_only=true", f"trainer.length_bins=[{edge}]", "data.train_batch_size=4"),
        f"trainer.default_local_dir={tmp_path / 'out'}",
    ]
    (own, told), (other_own, other_told) = run_ranks(_measure_twice, 2, options)
    assert (own, told) == (other_own, other_told)
    assert own["val/answers"] == sum(map(len, ROWS.values()))
    # The first and last rows of qa2 name a second label; the third repeats the target. In the other task only an end
    # token may follow the target, and anything may follow that.
    accuracy = {"qa1_1k": 1.0, "qa2_1k": 2 / 4, "stories": 1 / 5}
    for category, share in greedy.items():
        for measured in (own, told):
            assert measured[f"val/{category}_exact_match"] == pytest.approx(share)
        assert told[f"val/{category}_accuracy"] == pytest.approx(accuracy[category])
    assert own["val/stories_accuracy"] == pytest.approx(greedy["stories"])
    for measured, kind, shares in ((own, "exact_match", greedy), (told, "accuracy", accuracy)):
        right = sum(share * len(ROWS[category]) for category, share in shares.items())
        assert measured[f"val/{kind}"] == pytest.approx(right / own["val/answers"])
    rows = [row for of_category in likeliest.values() for row in of_category]
    for name, is_in in ((f"0_{edge}", lambda n: n <= edge), (f"{edge}_inf", lambda n: n > edge)):
        share = fmean(is_likeliest for tokens, is_likeliest in rows if is_in(tokens))
        assert own[f"val/exact_match_{name}"] == own[f"val/accuracy_{name}"] == pytest.approx(share)
