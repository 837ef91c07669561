#!/usr/bin/env bash
# The small form of this recipe, on two CPU cores: recipes/qwen3_8b_128k/small.sh [FOLDER [override …]]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../small_run.sh"
small_config='{num_hidden_layers:2,hidden_size:128,intermediate_size:384,initializer_range:0.09,max_position_embeddings:512}'
open_small qwen3_8b_128k "${1:-qwen3_8b_128k_small}" long=200 chats=600

say "Training on two ranks."
verl-ext train "$run/small.yaml" trainer.overwrite=true "${@:2}"

say "Curves."
verl-ext show "$run/out"
