#!/usr/bin/env bash
# The small form of this recipe, on two CPU cores: recipes/qwen3_0.6b_first_run/small.sh [FOLDER [override …]]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../small_run.sh"
open_small qwen3_0.6b_first_run "${1:-qwen3_0.6b_first_run_small}" chats=500 maths=300

say "Training on two ranks."
verl-ext train "$run/small.yaml" trainer.overwrite=true "${@:2}"

say "Curves."
verl-ext show "$run/out"

say "A question to it."
verl-ext chat "$run/out" prompt='Which day follows Monday?' temperature=0
