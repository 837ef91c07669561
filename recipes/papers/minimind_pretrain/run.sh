#!/usr/bin/env bash
# A model from scratch: a tokenizer trained on your text, random weights, pretraining. The same command resumes.
#
#   recipes/papers/minimind_pretrain/run.sh TRAIN.jsonl [FOLDER [override …]]
#
# TRAIN.jsonl  lines of {"text"}; any file, folder or glob that data=pretrain reads
# FOLDER       minimind_pretrain_run by default
# override …   for the training run
# MODEL=tiny   another architecture of `verl-ext init-model`; NPROC_PER_NODE as in launch/node.sh
# RECIPE=…     minimind_pretrain by default, or minimind_pretrain/minimind3
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
if (($# < 1)); then
    sed -n '/^#   recipes/s/^#   /usage: /p' "${BASH_SOURCE[0]}" >&2
    exit 2
fi
text=$1 run=${2:-minimind_pretrain_run}
shift $(($# < 2 ? $# : 2))

if [[ ! -e "$run/model" ]]; then
    verl-ext init-model "model=${MODEL:-minimind_104m}" "output_dir=$run/model" "tokenizer.train_on=[$text]"
fi
exec verl-ext launch "recipe=${RECIPE:-minimind_pretrain}" "data.train_dir=$text" "model.path=$run/model" \
    "trainer.default_local_dir=$run/checkpoints" "$@"
