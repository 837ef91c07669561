#!/usr/bin/env bash
# The small form of this recipe, on two CPU cores: recipes/reasoning_and_tools/small.sh [FOLDER [override …]]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../small_run.sh"
open_small reasoning_and_tools "${1:-reasoning_and_tools_small}" reasoning=200 tools=120

say "Training on two ranks."
verl-ext train "$run/small.yaml" trainer.overwrite=true "${@:2}"

say "What is learnt of a call and of a thought, and the curves."
verl-ext show data "$run"/tokenized/*/train row=0
verl-ext show "$run/out"
