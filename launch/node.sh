#!/usr/bin/env bash
# One node of a training run: the one torchrun line, with the topology taken from the environment.
#
#   launch/node.sh recipe=quickstart data.train_dir=DIR model.path=MODEL              # this machine, every GPU of it
#   NNODES=4 NODE_RANK=0 MASTER_ADDR=host0 launch/node.sh recipe=token_aware_pack …   # the same on each of 4 nodes
#   DRY_RUN=1 launch/node.sh …                                                        # print the line, start nothing
#
# variable         other names               default
# NNODES           nnodes, PET_NNODES        1
# NODE_RANK        node_rank, PET_NODE_RANK  0 on one node; needed on several
# NPROC_PER_NODE   nproc_per_node, PET_…     CUDA_VISIBLE_DEVICES, else the GPUs nvidia-smi lists, else 1
# MASTER_ADDR      master_ip, PET_…          this machine on one node; needed on several
# MASTER_PORT      master_port, PET_…        a free port on one node; 29500 on several
# LOCAL_ADDR       local_addr, PET_…         this host's name: the address by which other nodes reach it
# MAX_RESTARTS     max_restarts, PET_…       0; n: torchrun starts all ranks again up to n times (c10d rendezvous)
# PREFLIGHT        -                         1 on several nodes: `verl-ext preflight` before torchrun; 0: without
# PREFLIGHT_TIMEOUT                          600 seconds, for the nodes to find each other
#
# SIGTERM, SIGINT or SIGUSR1: the ranks of all nodes save at the end of their step, and this ends with 75 (EX_TEMPFAIL,
# run it again); a second one ends the ranks at once. Every other exit code is torchrun's.
#
# WORLD_SIZE and RANK are not read: they count processes for some schedulers and nodes for others. Interfaces are never
# guessed: GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME are passed on as they are, and docs/launching.md says when to set
# them. Every argument is an override of conf/sft.yaml and goes through unchanged.
set -euo pipefail

fail() {
    echo "launch/node.sh: $1" >&2
    exit 2
}

# first_set DEFAULT NAME…: the value of the first variable that is set and not empty
first_set() {
    local default=$1 name
    shift
    for name in "$@"; do
        if [[ -n "${!name:-}" ]]; then
            echo "${!name}"
            return
        fi
    done
    echo "$default"
}

count_devices() {
    local count=0
    if [[ -n "${CUDA_VISIBLE_DEVICES+set}" ]]; then
        count=$(tr ',' '\n' <<<"$CUDA_VISIBLE_DEVICES" | grep -c '[^[:space:]]') || true
    elif command -v nvidia-smi >/dev/null; then
        count=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU ') || true
    fi
    echo $((count > 0 ? count : 1))
}

NNODES=$(first_set 1 NNODES nnodes PET_NNODES)
NODE_RANK=$(first_set "" NODE_RANK node_rank PET_NODE_RANK)
NPROC_PER_NODE=$(first_set "" NPROC_PER_NODE nproc_per_node PET_NPROC_PER_NODE)
MASTER_ADDR=$(first_set "" MASTER_ADDR master_ip PET_MASTER_ADDR)
MASTER_PORT=$(first_set "" MASTER_PORT master_port PET_MASTER_PORT)
LOCAL_ADDR=$(first_set "" LOCAL_ADDR local_addr PET_LOCAL_ADDR)
MAX_RESTARTS=$(first_set 0 MAX_RESTARTS max_restarts PET_MAX_RESTARTS)
NPROC_PER_NODE=${NPROC_PER_NODE:-$(count_devices)}

[[ "$NNODES" =~ ^[1-9][0-9]*$ ]] || fail "NNODES must be a whole number of at least 1; got '$NNODES'"
[[ "$NPROC_PER_NODE" =~ ^[1-9][0-9]*$ ]] ||
    fail "NPROC_PER_NODE must be a whole number of at least 1; got '$NPROC_PER_NODE'"

[[ "$MAX_RESTARTS" =~ ^[0-9]+$ ]] || fail "MAX_RESTARTS must be a whole number of at least 0; got '$MAX_RESTARTS'"

if ((NNODES == 1)); then
    NODE_RANK=0
    standalone=$([[ -z "$MASTER_PORT" ]] && echo yes || echo no)
    MASTER_ADDR=${MASTER_ADDR:-127.0.0.1}
else
    standalone=no
    [[ -n "$MASTER_ADDR" ]] || fail "MASTER_ADDR (or master_ip) must name the first node when NNODES=$NNODES; got nothing"
    if ! [[ "$NODE_RANK" =~ ^[0-9]+$ ]] || ((NODE_RANK >= NNODES)); then
        fail "NODE_RANK must be 0 to $((NNODES - 1)) when NNODES=$NNODES; got '$NODE_RANK'"
    fi
    MASTER_PORT=${MASTER_PORT:-29500}
fi

if [[ "$standalone" == yes ]]; then
    # A rendezvous of its own on a free port: two runs on one machine never meet.
    topology=(--standalone --local_addr=127.0.0.1)
elif ((MAX_RESTARTS > 0)); then
    # Nodes can leave and come back; node 0 keeps the store in which they meet.
    is_host=$((NODE_RANK == 0 ? 1 : 0))
    topology=("--nnodes=$NNODES" --rdzv_backend=c10d "--rdzv_endpoint=$MASTER_ADDR:$MASTER_PORT"
        "--rdzv_id=${RDZV_ID:-verl-ext-$MASTER_PORT}" "--rdzv_conf=is_host=$is_host")
else
    topology=("--nnodes=$NNODES" "--node_rank=$NODE_RANK" "--master_addr=$MASTER_ADDR" "--master_port=$MASTER_PORT")
fi
if [[ "$standalone" == no && -n "$LOCAL_ADDR" ]]; then topology+=("--local_addr=$LOCAL_ADDR"); fi
if ((MAX_RESTARTS > 0)); then
    topology+=("--max_restarts=$MAX_RESTARTS")
    # Ranks of a restart must not find the addresses of those before, which torchrun's shared store keeps.
    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
fi

line=(torchrun "${topology[@]}" "--nproc_per_node=$NPROC_PER_NODE" -m verl_ext.fsdp_sft_trainer "$@")
if [[ "${DRY_RUN:-0}" != 0 ]]; then
    printf '%q ' "${line[@]}"
    echo
    exit 0
fi

command -v torchrun >/dev/null || fail "torchrun must be on PATH; activate the environment that verl-ext is installed in"
if ((NNODES > 1)) && [[ "${PREFLIGHT:-1}" != 0 ]]; then
    verl-ext preflight "nnodes=$NNODES" "node_rank=$NODE_RANK" "master_addr=$MASTER_ADDR" "master_port=$MASTER_PORT" \
        "processes=$NPROC_PER_NODE" "timeout=${PREFLIGHT_TIMEOUT:-600}" ${LOCAL_ADDR:+"local_addr=$LOCAL_ADDR"} >&2
fi
export PYTHONUNBUFFERED=1
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} # what torchrun sets, with a warning on every start
export NNODES                                # recipes may set the packs per step from it
# A scheduler may signal torchrun too: it passes these on, and leaves the ranks this many seconds to save.
export PET_SIGNALS_TO_HANDLE=${PET_SIGNALS_TO_HANDLE:-SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1}
export PET_SHUTDOWN_TIMEOUT=${PET_SHUTDOWN_TIMEOUT:-3600}

# Requests go to the ranks through a file, past torchrun, which would end with an error (verl_ext/trainer/signals.py).
VERL_EXT_REQUESTS=$(mktemp -d "${TMPDIR:-/tmp}/verl-ext-XXXXXX")
export VERL_EXT_REQUESTS VERL_EXT_LAUNCHER=$$
torchrun=
trap '[[ -z "$torchrun" ]] || kill -TERM "$torchrun"; rm -rf "$VERL_EXT_REQUESTS"' EXIT
trap 'signalled=yes; echo SIGTERM >>"$VERL_EXT_REQUESTS/stop"' TERM
trap 'signalled=yes; echo SIGINT >>"$VERL_EXT_REQUESTS/stop"' INT
trap 'signalled=yes; echo SIGUSR1 >>"$VERL_EXT_REQUESTS/stop"' USR1

set -m # a process group of its own: Ctrl-C is for this script alone
"${line[@]}" &
torchrun=$!
set +m
signalled=yes
while [[ "$signalled" == yes ]]; do # a signal ends the wait
    signalled=no status=0
    wait "$torchrun" || status=$?
done
torchrun=
if [[ -e "$VERL_EXT_REQUESTS/unfinished" ]]; then status=75; fi
exit "$status"
