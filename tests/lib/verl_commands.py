"""The options of verl's published SFT commands for its FSDP engine, and its own rules for steps and rates.

COMMANDS maps a name to a command's options, as they stand in verl's examples, recipes, documentation and tests of
versions 0.1 to 0.9. Options of the same values in several commands have a name here.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

ROWS = 7473  # of verl's GSM8K file
RANKS = 8

_FILES = "data.train_files=/d/gsm8k/train.parquet data.val_files=/d/gsm8k/test.parquet "
_PAIR = _FILES + "data.prompt_key=extra_info data.response_key=extra_info "
GSM8K = _PAIR + "data.prompt_dict_keys=['question'] +data.response_dict_keys=['answer'] "
GSM8K_PLUS = _PAIR + "+data.prompt_dict_keys=['question'] +data.response_dict_keys=['answer'] "
PROMPT = _FILES + "data.prompt_key=prompt data.response_key=answer "
QUESTION = _FILES + "data.prompt_key=question data.response_key=answer "
TURNS = (
    "data.train_files=/d/multiturn/train.parquet data.val_files=/d/multiturn/test.parquet data.multiturn.enable=true "
    "data.multiturn.messages_key=messages "
)
SP2 = "ulysses_sequence_parallel_size=2 use_remove_padding=true "
LORA = "model.lora_rank=32 model.lora_alpha=16 model.target_modules=all-linear "
NO_HDFS = "trainer.default_hdfs_dir=null "
SHORT = "optim.lr=1e-4 data.micro_batch_size=4 trainer.total_training_steps=1 "
RETOOL = (
    "data.train_files=/d/retool/train.parquet data.val_files=/d/retool/test.parquet data.max_length=16384 "
    "data.multiturn.enable=true data.multiturn.messages_key=messages data.multiturn.tools_key=tools "
)
CHARACTERS = (
    "data.train_files=/d/char_count/train.parquet data.val_files=/d/char_count/test.parquet data.prompt_key=prompt "
    "data.response_key=response data.micro_batch_size_per_gpu=8 data.max_length=256 data.train_batch_size=256 "
    "use_remove_padding=True model.partial_pretrain=SmolLM2 trainer.total_epochs=3 "
)
ENGINE = (
    "data.train_files=/d/gsm8k_sft/train.parquet data.val_files=/d/gsm8k_sft/test.parquet data.pad_mode=no_padding "
    "data.truncation=error data.use_dynamic_bsz=True data.messages_key=messages engine=fsdp optim=fsdp "
    "optim.lr=1e-5 optim.lr_warmup_steps_ratio=0.2 optim.weight_decay=0.1 optim.betas=[0.9,0.95] optim.clip_grad=1.0 "
    "optim.min_lr_ratio=0.1 optim.lr_scheduler_type=cosine trainer.test_freq=after_each_epoch trainer.save_freq=-1 "
    "trainer.logger=['console','file'] trainer.total_epochs=2 trainer.total_training_steps=2 "
    "trainer.resume_mode=disable model.path=M "
)
ENGINE_7 = ENGINE + "data.train_batch_size=128 data.max_token_len_per_gpu=2048 "
ENGINE_9 = ENGINE_7 + "model=hf_model data.ignore_input_ids_mismatch=True "
LONG = (
    "data.train_batch_size=96 data.pad_mode=no_padding data.truncation=error data.use_dynamic_bsz=True "
    "data.max_token_len_per_gpu=65536 model.use_remove_padding=True engine=fsdp optim=fsdp optim.lr=2e-5 "
    "optim.lr_warmup_steps_ratio=0.01 optim.weight_decay=0.1 optim.betas=[0.9,0.95] optim.clip_grad=1.0 "
    "optim.min_lr_ratio=0.1 optim.warmup_style=cosine engine.strategy=fsdp2 engine.fsdp_size=-1 trainer.test_freq=-1 "
    "trainer.save_freq=4000 trainer.logger=['console','wandb'] trainer.resume_mode=auto trainer.max_ckpt_to_keep=5 "
    "checkpoint.save_contents=[model,optimizer,extra] model.path=M "
)
GSM8K_9 = _FILES + "data.messages_key=messages "
GEMMA4 = (
    "data.micro_batch_size_per_gpu=1 data.max_length=2048 data.truncation=left data.use_dynamic_bsz=True "
    "data.max_token_len_per_gpu=4096 data.ignore_input_ids_mismatch=True model.use_remove_padding=False "
    "model.trust_remote_code=True optim.lr=1e-5 optim.weight_decay=0.01 engine=fsdp trainer.total_epochs=2 "
)
A3 = (
    _FILES + "data.train_batch_size=16 data.truncation=right data.max_length=4096 data.micro_batch_size_per_gpu=1 "
    "data.ignore_input_ids_mismatch=True optim.lr=3e-5 model.trust_remote_code=True model.use_remove_padding=True "
    "trainer.total_epochs=2 data.use_dynamic_bsz=False engine.ulysses_sequence_parallel_size=1 "
)
QWEN3_9 = (
    GSM8K_9 + "data.micro_batch_size_per_gpu=64 optim.lr=1e-4 engine=fsdp engine.ulysses_sequence_parallel_size=2 "
    "model.path=M model.use_remove_padding=true trainer.total_epochs=2 "
)
WANDB, CONSOLE = "trainer.logger=['console','wandb'] ", "trainer.logger=console "
TRACKING = "trainer.logger=['console','tracking'] "
M4, M8, M32, M64 = (f"data.micro_batch_size_per_gpu={rows} " for rows in (4, 8, 32, 64))

COMMANDS = {
    "0.1 gsm8k page": QUESTION + "data.micro_batch_size=8 trainer.total_epochs=4 " + TRACKING,
    "0.1 deepseek 6.7b": PROMPT + "data.micro_batch_size=8 trainer.total_epochs=4 " + TRACKING,
    "0.1 gemma 2b": PROMPT + "data.micro_batch_size=32 trainer.total_epochs=3 " + TRACKING,
    "0.1 gemma 7b": PROMPT + "data.micro_batch_size=8 trainer.total_epochs=4 trainer.project_name=g " + TRACKING,
    "0.2 gsm8k page": QUESTION + M8 + "trainer.total_epochs=4 " + WANDB,
    "0.2 deepseek 6.7b": GSM8K_PLUS + M4 + "trainer.total_epochs=4 " + WANDB + NO_HDFS,
    "0.2 gemma 2b": GSM8K_PLUS + M4 + "trainer.total_epochs=2 " + WANDB + NO_HDFS,
    "0.2 gemma 7b": PROMPT + M4 + "trainer.total_epochs=4 " + WANDB + NO_HDFS,
    "0.2 qwen 0.5b peft": GSM8K_PLUS + M4 + "optim.lr=1e-4 trainer.total_epochs=1 " + NO_HDFS + LORA,
    "0.2 qwen 0.5b sp2": GSM8K_PLUS + SHORT + NO_HDFS + SP2,
    "0.2 qwen 0.5b sp2 liger": GSM8K_PLUS + "optim.lr=1e-4 data.micro_batch_size=4 model.use_liger=True " + SP2,
    "0.2 test": GSM8K_PLUS + M32 + "trainer.total_training_steps=1 " + NO_HDFS,
    "0.2 test peft": GSM8K_PLUS + M4 + "optim.lr=1e-4 trainer.total_training_steps=1 " + NO_HDFS + LORA,
    "0.2 test sp2 liger": GSM8K_PLUS + SHORT + "model.use_liger=True " + NO_HDFS + SP2,
    "0.3 multiturn sp2": TURNS + "data.micro_batch_size=4 trainer.total_training_steps=1 " + NO_HDFS + SP2,
    "0.4 gsm8k page": QUESTION + M8 + "trainer.default_hdfs_dir=null trainer.total_epochs=4 " + WANDB,
    "0.4 deepseek 6.7b": GSM8K + M4 + "trainer.total_epochs=4 " + WANDB + NO_HDFS,
    "0.4 gemma 2b": GSM8K + M4 + "trainer.total_epochs=2 " + WANDB + NO_HDFS,
    "0.4 qwen 0.5b peft": GSM8K + M4 + "optim.lr=1e-4 trainer.total_epochs=1 " + NO_HDFS + LORA,
    "0.4 qwen 0.5b sp2": GSM8K + SHORT + NO_HDFS + SP2,
    "0.4 retool": RETOOL + "data.train_batch_size=16 data.micro_batch_size_per_gpu=2 trainer.total_epochs=2 "
    "ulysses_sequence_parallel_size=8 use_remove_padding=true ",
    "0.4 retool 7b sp4": RETOOL + "data.train_batch_size=128 data.micro_batch_size_per_gpu=16 optim.lr=1e-6 "
    "model.fsdp_config.cpu_offload=false model.fsdp_config.offload_params=false trainer.total_epochs=8 "
    "ulysses_sequence_parallel_size=4 use_remove_padding=true ",
    "0.4 retool 4b sp4": RETOOL + "data.train_batch_size=128 data.micro_batch_size_per_gpu=16 optim.lr=1e-6 "
    "model.trust_remote_code=true trainer.total_epochs=12 ulysses_sequence_parallel_size=4 use_remove_padding=true ",
    "0.4 retool 32b sp8": RETOOL + "data.train_batch_size=128 data.micro_batch_size_per_gpu=4 optim.lr=1e-6 "
    "model.fsdp_config.cpu_offload=true model.fsdp_config.offload_params=true trainer.total_epochs=12 "
    "ulysses_sequence_parallel_size=8 use_remove_padding=true ",
    "0.4 char count": CHARACTERS + NO_HDFS,
    "0.5 char count": CHARACTERS + CONSOLE,
    "0.5 retool 32b": RETOOL
    + "data.train_batch_size=32 model.strategy=fsdp trainer.total_epochs=6 "
    + M4
    + "ulysses_sequence_parallel_size=4 use_remove_padding=true ",
    "0.6 gsm8k page": QUESTION + M8 + "trainer.total_epochs=4 trainer.project_name=g " + WANDB,
    "0.6 deepseek 6.7b": GSM8K + M4 + "trainer.total_epochs=4 trainer.project_name=g " + WANDB,
    "0.6 gemma 2b": GSM8K + M4 + "trainer.total_epochs=2 trainer.project_name=g " + WANDB,
    "0.6 gemma 7b": _PAIR + "data.prompt_dict_keys=['question'] data.response_dict_keys=['answer'] "
    "trainer.total_epochs=4 " + M4 + WANDB,
    "0.6 qwen 0.5b peft": GSM8K + M4 + "optim.lr=1e-4 trainer.total_epochs=1 " + CONSOLE + LORA,
    "0.6 qwen 0.5b sp2": GSM8K + SHORT + CONSOLE + SP2,
    "0.6 qwen 0.5b sp2 liger": GSM8K + "optim.lr=1e-4 data.micro_batch_size=4 model.use_liger=True " + CONSOLE + SP2,
    "0.6 seed-oss 36b": GSM8K + SHORT + "trainer.project_name=g " + CONSOLE + SP2,
    "0.6 multiturn sp2": TURNS + "data.micro_batch_size=4 trainer.total_training_steps=1 " + CONSOLE + SP2,
    "0.6 collabllm": "data.train_files=/d/collabllm/sft_train.parquet "
    "data.val_files=/d/collabllm/sft_validation.parquet "
    "data.multiturn.enable=true data.multiturn.messages_key=prompt optim.lr=1e-6 data.train_batch_size=64 "
    "data.micro_batch_size_per_gpu=2 data.max_length=8196 trainer.total_epochs=3 ulysses_sequence_parallel_size=1 "
    "use_remove_padding=true " + CONSOLE,
    "0.6 retool 7b": RETOOL
    + "data.train_batch_size=32 model.strategy=fsdp trainer.total_epochs=6 "
    + M4
    + "trainer.save_freq=62 ulysses_sequence_parallel_size=4 use_remove_padding=true ",
    "0.6 qwen 8b peft sp2": GSM8K + M64 + "optim.lr=1e-4 trainer.total_epochs=2 model.strategy=fsdp " + LORA + SP2,
    "0.6 openmath 8b": LONG + "data.train_files=/d/cot.parquet data.max_length=32768 data.messages_key=messages "
    "engine.ulysses_sequence_parallel_size=8 trainer.total_epochs=1 ",
    "0.6 engine": ENGINE + "data.train_batch_size=256 data.max_token_len_per_gpu=8192 engine.strategy=fsdp ",
    "0.6 engine sp2": ENGINE + "data.train_batch_size=256 data.max_token_len_per_gpu=8192 engine.strategy=fsdp2 "
    "engine.ulysses_sequence_parallel_size=2 engine.fsdp_size=2 ",
    "0.7 engine": ENGINE_7 + "engine.strategy=fsdp engine.fsdp_size=1 model.use_remove_padding=True ",
    "0.7 engine sp2": ENGINE_7 + "engine.strategy=fsdp engine.ulysses_sequence_parallel_size=2 engine.fsdp_size=2 ",
    "0.7 engine padded": ENGINE_7 + "engine.strategy=fsdp engine.fsdp_size=-1 model.use_remove_padding=False ",
    "0.7 engine fsdp2 sp2": ENGINE_7 + "engine.strategy=fsdp2 engine.ulysses_sequence_parallel_size=2 ",
    "0.7 engine on Ray": ENGINE_7 + "trainer.nnodes=1 trainer.n_gpus_per_node=8 engine.strategy=fsdp ",
    "0.8 engine": ENGINE_9 + "engine.strategy=fsdp engine.fsdp_size=1 ",
    "0.8 engine sp2": ENGINE_9 + "engine.strategy=fsdp engine.ulysses_sequence_parallel_size=2 engine.fsdp_size=2 ",
    "0.8 engine fsdp2 sp2": ENGINE_9 + "engine.strategy=fsdp2 engine.ulysses_sequence_parallel_size=2 ",
    "0.9 engine padded": ENGINE_9 + "engine.strategy=fsdp engine.fsdp_size=-1 model.use_remove_padding=False ",
    "0.9 qwen3 8b": QWEN3_9,
    "0.9 qwen3 8b peft": QWEN3_9 + LORA,
    "0.9 qwen3 0.6b a3": A3,
    "0.9 gemma4 31b": GSM8K_9 + GEMMA4 + "data.train_batch_size=8 optim.betas=[0.9,0.95] "
    "model.enable_gradient_checkpointing=True ",
    "0.9 gemma4 e2b": GSM8K_9 + GEMMA4 + "data.train_batch_size=32 ",
}


@dataclass(frozen=True)
class Course:
    """What verl makes of a command: its steps, the rows of each, the most tokens of a row, the rate by step."""

    steps: int
    rows: int
    length: int
    rate: Callable[[int], float]


def course_of(options: dict[str, str], old: bool, rows: int = ROWS) -> Course:
    """Follow verl's own trainers: the fsdp_sft_trainer of verl ≤ 0.6 (`old`), or the sft_trainer of verl 0.9.

    options: the command's, without quotes and plus signs. rows: those of the training file.
    """

    def number(key: str, default: float) -> float:
        return float(options.get(key, default))

    batch, epochs = int(number("data.train_batch_size", 256)), int(number("trainer.total_epochs", 4))
    of_epochs = rows // batch * epochs
    asked = int(number("trainer.total_training_steps", of_epochs))
    span = of_epochs if old else asked
    lr = number("optim.lr", 1e-5 if old else 1e-3)
    share = number("optim.warmup_steps_ratio", number("optim.lr_warmup_steps_ratio", 0.1 if old else 0.0))
    kind = options.get("optim.lr_scheduler_type", options.get("optim.warmup_style", "constant"))
    kind = options.get("optim.lr_scheduler", "cosine") if old else kind
    floor, warmup = number("optim.min_lr_ratio", 0.0), int(share * span)

    def rate(step: int) -> float:
        """Return the rate of a step, counted from 0."""
        if step < warmup:
            return lr * step / warmup
        if kind == "constant":
            return lr
        wave = 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, span - warmup)))
        return lr * max(0.0, wave * (1 - floor) + floor)

    return Course(min(asked, of_epochs), batch, int(number("data.max_length", 1024)), rate)
