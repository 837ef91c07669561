#!/usr/bin/env bash
# The small form of this recipe, on two CPU cores: recipes/dpo_after_sft/small.sh [FOLDER [override …]]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../small_run.sh"
texts=DATA/chats.jsonl,DATA/maths.jsonl
open_small dpo_after_sft "${1:-dpo_after_sft_small}" chats=500 maths=200 sum_pairs=200 fact_pairs=200
train_base

say "Training on two ranks."
verl-ext train "$run/small.yaml" trainer.overwrite=true "${@:2}"

say "Curves."
verl-ext show "$run/out"
