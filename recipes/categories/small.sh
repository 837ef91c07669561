#!/usr/bin/env bash
# The small form of this recipe, on two CPU cores: recipes/categories/small.sh [FOLDER [override …]]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../small_run.sh"
open_small categories "${1:-categories_small}" chats=500 maths=300 code=300
train_base

say "Training on two ranks, with a tenth of chats and without."
python "$recipes/small_data.py" "$run/val" chats=60 maths=60 code=60
verl-ext train "$run/small.yaml" trainer.overwrite=true "trainer.default_local_dir=$run/with_chats" "${@:2}"
verl-ext train "$run/small.yaml" trainer.overwrite=true "trainer.default_local_dir=$run/without_chats" \
    "data.sources={maths:$data/maths.jsonl,code:$data/code.jsonl}" sample=1.0 "${@:2}"

say "Curves."
verl-ext show "$run/with_chats" "$run/without_chats"
