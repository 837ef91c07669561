"""`verl-ext migrate` renames an old command's keys, and keeps its words, quotes and variables as written."""

import shlex
import subprocess

import pytest

from tests.lib.errors import names
from verl_ext.__main__ import main
from verl_ext.config.compose import compose
from verl_ext.tools.migrate.script import commands_of

WORDS = [  # of examples/sft/gsm8k/run_qwen_05_sp2.sh of verl 0.4, and what they become
    ("data.train_files=$HOME/data/gsm8k/train.parquet", "data.sources.gsm8k=$HOME/data/gsm8k/train.parquet"),
    ("data.val_files=$HOME/data/gsm8k/test.parquet", "data.val_sources.gsm8k=$HOME/data/gsm8k/test.parquet"),
    ("data.prompt_key=extra_info data.prompt_dict_keys=['question']", "columns.prompt=extra_info.question"),
    ("data.response_key=extra_info +data.response_dict_keys=['answer']", "columns.response=extra_info.answer"),
    ("", "data.max_tokens=1024"),
    ("", "data.strategy=none"),
    ("", "data.drop_last=true"),
    ("data.micro_batch_size=4", "data.micro_batch_size_per_gpu=4"),
    ("", "optim.lr_schedule_span=epochs"),
    ("optim.lr=1e-4", "optim.lr=1e-4"),
    ("model.partial_pretrain=Qwen/Qwen2.5-0.5B-Instruct", "model.path=Qwen/Qwen2.5-0.5B-Instruct"),
    ('trainer.default_local_dir="$save_path/a b"', 'trainer.default_local_dir="$save_path/a b"'),
    ("trainer.project_name=gsm8k-sft", "trainer.project_name=gsm8k-sft"),
    ("""'trainer.experiment_name=it'"'"'s'""", """trainer.experiment_name='it'"'"'s'"""),
    ("""trainer.logger='["console"]'""", """trainer.logger='["console"]'"""),
    ("trainer.total_training_steps=1 $@", "trainer.total_training_steps=1"),
    ("ulysses_sequence_parallel_size=2", "engine.ulysses_sequence_parallel_size=2"),
    ("use_remove_padding=true", "model.use_remove_padding=true"),
    ("", "data.train_batch_size=256"),
    ("", "trainer.total_epochs=4"),
    ("", "optim.betas=[0.9,0.95]"),
    ("", "optim.lr_scheduler_type=cosine"),
    ("", "optim.lr_warmup_steps_ratio=0.1"),
]
START = "torchrun --standalone --nnodes=1 --nproc_per_node=$nproc_per_node -m verl.trainer.fsdp_sft_trainer"
OLD = " \\\n    ".join([START, *(old for old, _ in WORDS if old)]) + " 2>&1 | tee log\n"


def migrated(capsys, *arguments: str) -> tuple[str, list[str]]:
    """Return (the new command, its comments)."""
    assert main(["migrate", *arguments]) == 0
    lines = capsys.readouterr().out.splitlines()
    comments = [line for line in lines if line.startswith("# ")]
    return "\n".join(lines[: len(lines) - len(comments)]), comments


def test_a_script_with_raw_files_is_one_command_that_keeps_its_words_quotes_and_variables(capsys):
    command, comments = migrated(capsys, OLD)
    start, *words, rest = command.split(" \\\n    ")
    assert start == "verl-ext train nproc=$nproc_per_node"
    assert words == [new for _, new in WORDS]
    assert rest == "$@ 2>&1 | tee log"
    assert "# model.partial_pretrain (verl ≤ 0.6) is read as model.path" in comments
    assert not any("no equivalent" in line or "unknown" in line for line in comments)


def test_a_file_with_the_script_is_read_as_its_command(tmp_path, capsys):
    (tmp_path / "sft.sh").write_text(f"set -x\nnproc_per_node=8\n# it's old\n{OLD}\necho done\n")
    whole = OLD.replace("$nproc_per_node", "8").replace(" 2>&1 | tee log", "")
    assert migrated(capsys, str(tmp_path / "sft.sh")) == migrated(capsys, whole)
    assert migrated(capsys, OLD.replace("per_node=$", "per_node $")) == migrated(capsys, OLD)


@pytest.mark.parametrize(
    "trainer", ["fsdp_sft_trainer.py", "/opt/verl/trainer/fsdp_sft_trainer.py", "-m verl.trainer.sft_trainer"]
)
def test_the_new_command_composes_and_is_one_that_migrates_to_itself(trainer, capsys):
    overrides = "+data.train_dir='a b' model.partial_pretrain=M optim.warmup_steps_ratio=.1 recipe=quickstart"
    old = f"torchrun --nproc_per_node=2 {trainer} {overrides}"
    command, comments = migrated(capsys, *shlex.split(old))  # unquoted on the command line: separate words
    words = shlex.split(command.replace("\\\n", " "))
    assert words[:4] == ["torchrun", "--nproc_per_node=2", "-m", "verl_ext.fsdp_sft_trainer"]
    config = compose(words[4:])
    assert (config.data.train_dir, config.model.path, config.optim.lr_warmup_steps_ratio) == ("a b", "M", 0.1)
    assert len(comments) == 2
    again = command.replace("verl_ext.fsdp_sft_trainer", "verl.trainer.fsdp_sft_trainer")
    assert migrated(capsys, again) == (command, [])


def test_a_command_on_ray_stays_on_ray_and_another_engine_is_left_out_with_its_keys_and_a_comment(capsys):
    command, _ = migrated(capsys, "python -m verl.trainer.sft_trainer_ray data.train_dir=d trainer.nnodes=2")
    assert command.split()[:3] == ["python", "-m", "verl_ext.fsdp_sft_trainer_ray"]
    foreign = "model=hf_model engine=megatron engine.tp_size=2"
    command, comments = migrated(capsys, f"python -m verl.trainer.sft_trainer data.train_dir=d {foreign} optim.lr=1")
    assert command.split(" \\\n    ")[1:] == ["data.train_dir=d", "optim.lr=1"]
    assert any(names(line, "engine", "fsdp") for line in comments)


@pytest.mark.parametrize("name", ["SFTDataSet", "Mine"])
def test_a_dataset_class_of_a_file_stays_with_its_keys_and_a_comment_says_when_to_leave_it_out(name, capsys):
    own = f"data.custom_cls.path=own.py data.custom_cls.name={name}"
    command, comments = migrated(capsys, f"python fsdp_sft_trainer.py data.train_dir=d data.max_length=9 {own}")
    assert command.split(" \\\n    ")[1:] == ["data.train_dir=d", "data.max_length=9", *own.split(), "optim.lr=1e-5"]
    assert comments[0].startswith("# leave data.custom_cls.* out if your class packs tokenized documents")


def test_an_unknown_key_is_named_and_kept(capsys):
    command, comments = migrated(capsys, "python fsdp_sft_trainer.py optim.lrr=1 +data.mine=2")
    assert "optim.lrr=1 \\\n    +data.mine=2" in command
    (first, second) = comments[2:]  # after verl's other defaults and its rate
    assert names(first, "optim.lrr", "nearest: optim.lr")
    assert names(second, "data.mine", "nearest: data.mixture")


def test_each_word_keeps_its_quotes_substitutions_and_variables_and_what_follows_the_command_is_left_alone(capsys):
    old = 'python fsdp_sft_trainer.py model.path=$(cat "my model") data.train_batch_size=$((8 * (N + 1))) && echo a=1'
    command, comments = migrated(capsys, old)
    words = ['model.path=$(cat "my model")', "data.train_batch_size=$((8 * (N + 1)))", "optim.lr=1e-5", "&& echo a=1"]
    assert command.split(" \\\n    ")[1:] == words
    told = ["# not given, and another default in verl", "# optim.lr is not given"]
    assert [comment.partition(": ")[0] for comment in comments] == told
    words = ['model.path="${M}/a"', "model.tokenizer_path=${M}/a", "data.train_dir='${M}/a'", r"\${N}", '"${EXTRA[@]}"']
    command, _ = migrated(capsys, f"python fsdp_sft_trainer.py {' '.join(words)}")
    assert command.split(" \\\n    ")[1:] == [*words[:3], "optim.lr=1e-5", " ".join(words[3:])]


@pytest.mark.parametrize(
    ("command", "things"),
    [
        ("python train.py a=1", ("axolotl, LLaMA-Factory, ms-swift, TRL", "none")),
        ("set -x\npython fsdp_sft_trainer.py a=1", ("several lines",)),
        ("python fsdp_sft_trainer.py a='1", ("quote",)),
    ],
)
def test_what_is_no_command_of_that_trainer_is_refused(command, things, capsys):
    assert main(["migrate", command]) == 2
    assert names(capsys.readouterr().err, "command", *things)


@pytest.mark.parametrize(
    ("name", "text", "code", "things"),
    [
        ("a.yaml", "", 1, ("a.yaml", "nothing")),
        ("a.sh", "", 2, ("command", "axolotl", "none")),
        ("a.yaml", "- a\n- b\n", 1, ("a.yaml", "a list")),
        ("a.yaml", "one: 1\n", 2, ("a.yaml", "axolotl", "none")),
        ("a.yaml", "base_model: M\ndatasets:\n  - *absent\n", 1, ("line 3", "'absent'")),
        ("a.yaml", "base_model: M\n\tdatasets: x\n", 1, ("line 2", "character")),
        ("a.yaml", "base_model: M\n---\nbase_model: N\n", 1, ("line 2", "another document")),
        ("a.json", '{"base_model": "M",', 1, ("line 1",)),
        ("a.yaml", "base_model: M\ndatasets: 5\n", 1, ("datasets", 5)),
        ("a.yaml", "base_model: M\ndatasets: {a: 1}\n", 1, ("datasets", "{'a': 1}")),
        ("a.yaml", "base_model: [M]\ndatasets: [o/a]\n", 1, ("model", "['M']")),
        ("a.sh", 'swift sft --model "M --dataset o/a\n', 2, ("command", "quote")),
    ],
)
def test_what_is_no_configuration_is_refused_in_one_line(name, text, code, things, tmp_path, capsys):
    (tmp_path / name).write_text(text)
    assert main(["migrate", str(tmp_path / name)]) == code
    (line,) = capsys.readouterr().err.splitlines()
    assert names(line, *things)


def test_a_script_is_read_as_the_shell_reads_it(tmp_path, capsys):
    lines = [
        "export MODEL=o/m RANK=4",
        "LENGTH=${LENGTH:-4096}",
        'NPROC_PER_NODE=2 swift sft --model=$MODEL --dataset "$DATA" --lora_rank $RANK \\',
        "    --max_length $LENGTH --seed=1 --tuner_type lora \\",
        "    --learning_rate 1e-5 --seed 2  # 'the end'",
        "    # --seed 3",
    ]
    (tmp_path / "a.sh").write_bytes("\r\n".join(lines).encode())
    command, comments = migrated(capsys, str(tmp_path / "a.sh"))
    words = shlex.split(command.replace("\\\n", " "))
    assert words[2] == "nproc=2"
    assert {"model.path=o/m", "data.sources.DATA=$DATA", "data.max_tokens=4096"} < {*words}
    assert {"model.lora_rank=4", "optim.lr=1e-5", "trainer.seed=2"} < {*words}
    assert not [line for line in comments if line.startswith(("# to correct", "# unknown", "# no equivalent"))]


SCRIPTS = {
    "defaults of variables, the trainer and its launcher in them": """
        MODE=${MODE:-spmd} GPUS=${GPUS:-2}
        if [ "$MODE" = "spmd" ]; then
          ENTRYPOINT=${ENTRYPOINT:-"-m verl.trainer.sft_trainer"}
          RUN="torchrun --nproc-per-node=${GPUS:-1} ${ENTRYPOINT}"
        else
          RUN="python -m verl.trainer.sft_trainer_ray"
        fi
        ENGINE="\\
            engine.strategy=fsdp2 \\
            optim.betas="[0.9,0.95]""
        echo "Using megatron engine"
        $RUN data.train_dir=${DIR:-${PLACE:-/d}/x} $ENGINE trainer.logger=['console','file'] \\
            # trainer.seed=1
        rm -rf "${PLACE:-/nowhere}/*"
    """,
    "arrays and numbers": """
        N=3; RATES=("optim.lr=${LR:-1e-4}") # the rate
        RATES+=(
            optim.clip_grad=1.0   # of norms
            'model.path=a b'
        )
        if [[ $N -ge 4 ]]; then RATES+=(optim.lr=1); elif [ -z "" ]; then NAME="x y"; else NAME=z; fi
        NAME+=!
        torchrun -m verl.trainer.sft_trainer data.train_dir=d "${RATES[@]}" trainer.project_name="$NAME"
    """,
    "one statement after a test, texts for files, cases": """
        PEFT=0 FUSE=${FUSE:-1} MORE=()
        [ "$PEFT" = 1 ] && MORE+=(model.lora_rank=32)
        [[ "$FUSE" == "1" ]] && MORE+=(model.use_liger=true)
        [ $PEFT -gt 0 ] || RATE=optim.lr=1
        cat > notes <<EOF
torchrun -m verl.trainer.sft_trainer data.train_dir=of_a_text
EOF
        torchrun -m verl.trainer.sft_trainer data.train_dir=d "${MORE[@]+"${MORE[@]}"}" $RATE
    """,
    "words in quotes": """
        A='$B "c"'
        torchrun fsdp_sft_trainer.py data.train_dir=d trainer.project_name='$A' "trainer.experiment_name=$N-1" && true
    """,
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_of_verls_has_the_words_that_bash_gives_its_trainer(name, tmp_path, capsys):
    (tmp_path / "a.sh").write_text("torchrun() { printf '%s\\0' \"$@\"; }\n" + SCRIPTS[name])
    told = subprocess.run(["bash", str(tmp_path / "a.sh")], capture_output=True, text=True, cwd=tmp_path, check=True)
    expected = [word for word in told.stdout.replace("Using megatron engine\n", "").split("\0") if word]
    (tmp_path / "b.sh").write_text(SCRIPTS[name])
    (words,) = [each for each in commands_of(SCRIPTS[name]) if each[0] == "torchrun"]
    assert words[1:] == [
        word.replace("-1", "$N-1") if word == "trainer.experiment_name=-1" else word for word in expected
    ]
    command, comments = migrated(capsys, str(tmp_path / "b.sh"))
    assert "data.train_dir=" in command
    assert not [line for line in comments if line.startswith(("# unknown", "# to correct"))]


def test_what_a_shell_alone_can_tell_is_said(tmp_path, capsys):
    lines = ["case $SIZE in", "  7b) LR=3;;", "esac", "if [ -f there ]; then LR=1; fi", "[ -f there ] && LR=2"]
    lines += ["if [ $# -lt 1 ]; then echo usage; fi"]
    lines += ['torchrun -m verl.trainer.sft_trainer data.train_dir=d optim.lr=$LR "${MORE[@]}" "$@"']
    (tmp_path / "a.sh").write_text("\n".join(lines))
    command, comments = migrated(capsys, str(tmp_path / "a.sh"))
    assert "optim.lr=$LR" in command
    said = [line.partition(": ")[0] for line in comments if ": " in line]
    assert {"# [ -f there ]", "# case $SIZE in"} <= {*said}
    assert not [line for line in said if "$#" in line]
    assert [line for line in comments if line.endswith("stays as it is: what it holds is not read")] == [
        f"# {word} stays as it is: what it holds is not read" for word in ('"${MORE[@]}"', '"$@"')
    ]


def test_ms_swifts_pt_trains_on_texts_without_a_chat_template(capsys):
    of_texts = "messages of a chat are joined without a template"
    for old, expected in (("swift pt", True), ("swift sft", False), ("swift sft --use_chat_template false", True)):
        _, comments = migrated(capsys, f"{old} --model M --dataset a.jsonl")
        assert any(of_texts in line for line in comments) == expected


def test_merge_keys_of_a_yaml_are_read(tmp_path, capsys):
    entries = "- &one {path: o/a, type: completion}\n- {<<: *one, path: o/b, split: 'train[:9]'}\n"
    (tmp_path / "a.yaml").write_text(f"base_model: M\ndatasets:\n{entries}")
    command, _ = migrated(capsys, str(tmp_path / "a.yaml"))
    assert "data.sources.a=hf://datasets/o/a" in command
    assert "hf://datasets/o/b" in command
