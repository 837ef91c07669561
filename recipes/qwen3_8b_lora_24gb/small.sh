#!/usr/bin/env bash
# The small form of this recipe, on two CPU cores: recipes/qwen3_8b_lora_24gb/small.sh [FOLDER [override …]]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../small_run.sh"
open_small qwen3_8b_lora_24gb "${1:-qwen3_8b_lora_24gb_small}" chats=500 code=400
train_base

say "Training on two ranks."
verl-ext train "$run/small.yaml" trainer.overwrite=true "${@:2}"

say "Curves."
verl-ext show "$run/out"
