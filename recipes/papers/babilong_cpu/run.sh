#!/usr/bin/env bash
# From nothing to the tables of README.md: prose, tokenizer, models, samples, runs with and without memory, report.
#
#   recipes/papers/babilong_cpu/run.sh [FOLDER [override …]]
#
# FOLDER: babilong_cpu_run by default; a folder that this script made is reused. Overrides apply to every training run.
# TASK=qa2 asks for objects in place of actors. SEEDS="1 2 3 4 5" sets the seeds of weights, memory and order.
# KINDS="memory plain" names the models to train.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
overrides=("${@:2}")
task=${TASK:-qa1}
read -ra seeds <<< "${SEEDS:-1 2 3 4 5}"
read -ra kinds <<< "${KINDS:-memory plain}"
case $task in
    qa1) layers=2 memories='{layers:[1]}' lengths='[239,495,1007,2031]' long='[4079,8175]' ;;
    qa2) layers=4 memories='{layers:[1,2,3],heads:2}' lengths='[111,239,495,1007]' long='[2031,4079]' ;;
    *) echo "TASK must be qa1 or qa2; got $task" >&2 && exit 2 ;;
esac
for kind in "${kinds[@]}"; do
    [[ " memory plain " == *" $kind "* ]] || { echo "KINDS must be of memory, plain; got $kind" >&2 && exit 2; }
done
source "$here/../../small_run.sh"
open_run babilong_cpu "${1:-babilong_cpu_run}"

# samples FOLDER TASK SIZE NUMBER SEED [override …]: write a file with facts anywhere in a text of SIZE tokens.
samples() {
    verl-ext babilong "output_dir=$run/$task/$1" overwrite=true "tasks=[$2]" "sizes=$3" "samples=$4" "seed=$5" \
        "model.path=$run/$task/inputs/model_${seeds[0]}" "background=$run/$task/inputs/background" reserve_tokens=0 "${@:6}"
}

say "1/4  Prose to hide facts in, a tokenizer, a Qwen3 with random weights for each seed."
python "$here/make_inputs.py" --output "$run/$task/inputs" --seeds "${seeds[@]}" --layers "$layers"

say "2/4  Samples: facts alone, then in longer and longer texts; for the report, up to 32 times the longest."
if [[ $task == qa1 ]]; then
    samples 1 qa1 "[0k]" 8000 1
    samples 2 qa1 "[111]" 1600 2
    samples 3 qa1 "[239]" 11200 3
else
    samples 1 qa1 "[0k]" 8000 1
    samples 2 qa2 "[0k]" 25600 2 story.max_facts=14
    samples 3 qa2 "[111]" 12800 3
fi
samples val "$task" "$lengths" 250 11
samples long "$task" "$long" 100 12
mv "$run/$task/long/$task"/*.json "$run/$task/val/$task/"

# train KIND SEED: train quietly on one rank; the output is in the run's folder.
train() {
    local output=$run/$task/$1_$2 memory files
    files=$(printf '%s,' "$run/$task"/[1-9])
    case $1 in
        memory) memory="model.memory=$memories" ;;
        plain) memory="model.memory.layers=[]" ;;
    esac
    mkdir -p "$output"
    VERL_FILE_LOGGER_PATH="$output/metrics.jsonl" NPROC_PER_NODE=1 verl-ext launch \
        recipe=babilong_cpu "data.train_dir=[${files%,}]" "data.cache_dir=$run/cache" \
        "model.path=$run/$task/inputs/model_$2" "$memory" "trainer.seed=$2" "trainer.default_local_dir=$output" \
        trainer.overwrite=true "${overrides[@]}" > "$output/output.log" 2>&1
}

fail() {
    tail -n 3 "$run/$task"/*/output.log >&2 || true
    kill $(jobs -p) 2>/dev/null || true
    exit 1
}

say "3/4  Training, two runs at a time; each one's lines are in $run/$task/KIND_SEED/output.log."
started=0
for seed in "${seeds[@]}"; do
    for kind in "${kinds[@]}"; do
        if ((started >= 2)); then wait -n || fail; fi
        { train "$kind" "$seed" && say "     $task, $kind, seed $seed: trained"; } &
        started=$((started + 1))
    done
done
for ((left = started < 2 ? started : 2; left > 0; left--)); do wait -n || fail; done

say "4/4  Answers, in several minutes."
python "$here/report.py" --run "$run" --task "$task"
verl-ext show "$run/$task"/*_* "html=$run/run_$task.html"
say "Done. Everything is in $run"
