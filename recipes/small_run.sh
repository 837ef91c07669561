# Sourced by the recipes that run on two CPU ranks: say a stage, open the folder of a run.

say() { printf '\n[%3ds] %s\n' "$SECONDS" "$1"; }

# open_run RECIPE FOLDER: make or reuse the folder, which must be new, empty or of an earlier run of the same recipe.
# Sets run and data, and what CPU ranks need in the environment.
open_run() {
    local recipe=$1
    run=$2
    if [[ -e "$run" && ! -e "$run/.$recipe" && -n "$(ls -A "$run" 2>/dev/null || echo file)" ]]; then
        echo "recipes/$recipe/run.sh: FOLDER must be new, empty or of an earlier run; got $run" >&2
        exit 2
    fi
    if ! python -c 'import verl_ext, matplotlib' 2>/dev/null; then
        echo "recipes/$recipe/run.sh: python on PATH must have verl-ext[test]; got $(command -v python || echo none)" >&2
        exit 2
    fi
    mkdir -p "$run"
    touch "$run/.$recipe"
    run=$(cd "$run" && pwd)
    data=$run/data
    export CUDA_VISIBLE_DEVICES=        # CPU ranks, also where there is a GPU
    export TOKENIZERS_PARALLELISM=false # the tokenize command has processes of its own
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
    export VERL_FILE_LOGGER_PATH="$run/metrics.jsonl"
}
