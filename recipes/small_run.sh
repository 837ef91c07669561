# Sourced by the recipes that run on two CPU ranks: say a stage, open the folder of a run, show it.

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
    if ! python -c 'import verl_ext, vl_convert' 2>/dev/null; then
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
}

# show_run: the curves of the run in $run/checkpoints, here as text and as figures in run.html.
show_run() {
    verl-ext show "$run/checkpoints"
    verl-ext show "$run/checkpoints" "html=$run/run.html"
}
