#!/usr/bin/env bash
# The small form of this recipe, on two CPU cores: recipes/continued_pretraining/small.sh [FOLDER [override …]]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../small_run.sh"
open_small continued_pretraining "${1:-continued_pretraining_small}" domain=300 general=300

say "An index of both sources."
verl-ext index "sources={domain:$data/domain.jsonl,general:$data/general.jsonl}" "output_dir=$run/index" \
    "model.path=$run/model" overwrite=true

say "Training on two ranks."
verl-ext train "$run/small.yaml" trainer.overwrite=true "${@:2}"

say "Curves."
verl-ext show "$run/out"
