#!/usr/bin/env bash
# The small form of this recipe, on two CPU cores: recipes/qwen3_8b_sft/small.sh [FOLDER [override …]]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../small_run.sh"
open_small qwen3_8b_sft "${1:-qwen3_8b_sft_small}" chats=1000 code=600

say "Training on two ranks."
verl-ext train "$run/small.yaml" trainer.overwrite=true "${@:2}"

say "Curves."
verl-ext show "$run/out"
