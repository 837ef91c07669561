"""`verl-ext migrate` on what public configurations ask for: answers, parallelism, data sets, quantized bases."""

import re

from tests.lib.migrated import SMALL, moved
from verl_ext.tools.migrate.command import MigrateOptions, migrate


def test_a_key_whose_work_is_done_otherwise_is_said_with_its_value_and_counted_apart(tmp_path):
    found = moved("axolotl", SMALL["axolotl"] | {"load_in_8bit": True, "fp8": False}, tmp_path)
    lines = list(found.comments())
    assert lines[0] == "4 keys of T: 2 in the command, 1 need nothing, 1 done otherwise"
    assert any(line.startswith("differs: load_in_8bit=true: the base stays in bf16") for line in lines)
    assert "differs: save_total_limit not given: axolotl keeps the last 4 checkpoints, a run here all" in lines


def test_variables_that_read_images_are_named_if_the_command_sets_them():
    text = migrate(MigrateOptions("MAX_PIXELS=9 OTHER=1 swift sft --model M --dataset o/a"))
    assert "# no equivalent: MAX_PIXELS=9: records are text" in text
    assert "OTHER" not in text


def test_a_command_of_answers_passes_the_checks_of_the_trainer():
    """The trainer refuses options that the loss does not take, and units that would be cut."""
    for command in (
        "trl dpo --model_name_or_path M --dataset_name o/a --beta 0.2 --label_smoothing 0.1",
        "swift rlhf --rlhf_type simpo --model M --dataset o/a --split_dataset_ratio 0.1",
        "swift rlhf --rlhf_type kto --model M --dataset o/a --truncation_strategy right",
    ):
        assert "# to correct" not in migrate(MigrateOptions(command))


def test_a_command_of_the_megatron_engine_names_its_own_keys(tmp_path):
    command = "NPROC_PER_NODE=4 megatron sft --model M --dataset o/a --lr 1e-5 --global_batch_size 8 --no_such 3"
    lines = migrate(MigrateOptions(command)).splitlines()
    assert lines[0].startswith("verl-ext train nproc=4")
    assert "    data.train_batch_size=8 \\" in lines
    assert migrate(MigrateOptions(command.partition(" ")[2])).startswith("verl-ext train \\\n")
    assert "# 5 keys of ms-swift: 4 in the command, 0 need nothing, 1 unknown" in lines


def test_the_command_of_answers_without_a_type_is_dpo(tmp_path):
    (tmp_path / "x.yaml").write_text("model: M\ndataset: o/a\nrlhf_type: kto\nENV: {MAX_PIXELS: 9}\n")
    assert "loss=dpo" in migrate(MigrateOptions("swift rlhf --model M --dataset o/a"))
    text = migrate(MigrateOptions(f"megatron rlhf --config {tmp_path}/x.yaml"))
    assert "loss=kto" in text
    assert "# no equivalent: MAX_PIXELS=9: records are text" in text


def test_the_weights_of_an_agents_words_are_those_of_ms_swift(tmp_path):
    """Its own splitting of this turn: a key and the text after it, up to the next key."""
    patterns = moved("swift", SMALL["swift"] | {"loss_scale": "react"}, tmp_path).words["weights"]
    text = "Thought: a Action: b Action Input: c Observation: d Thought: e Final Answer: f"
    weights = [1.0] * len(text)
    for pattern, weight in patterns.items():
        for match in re.finditer(pattern, text):
            for place in range(match.start(), match.end()):
                weights[place] *= weight
    parts = [("Thought: a ", 1), ("Action: b Action Input: c Observation:", 2), (" d ", 0), (text[-26:], 1)]
    assert weights == [weight for part, weight in parts for _ in part]
