#!/usr/bin/env bash
# One node of a training run: one torchrun command, with the topology from the environment.
#
#   launch/node.sh recipe=quickstart data.train_dir=DIR model.path=MODEL              # this machine, all its GPUs
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
# After SIGTERM, SIGINT or SIGUSR1 the ranks of all nodes save at the end of their step, and this script ends with 75
# (EX_TEMPFAIL: run it again). A second signal ends the ranks at once; if there are no ranks yet, the first one does.
# Every other exit code is torchrun's.
#
# WORLD_SIZE and RANK are not read: they count processes for some schedulers and nodes for others. Interfaces are never
# guessed: GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME are passed on as they are, and docs/launching.md says when to set
# them. Every argument is an override of conf/sft.yaml and goes through unchanged.
set -euo pipefail

# shellcheck source=launch/topology.sh
source "$(dirname "${BASH_SOURCE[0]}")/topology.sh" 29500

standalone=$([[ "$NNODES" == 1 && -z "$MASTER_PORT" ]] && echo yes || echo no)
if [[ "$standalone" == yes ]]; then
    # A separate rendezvous on a free port, so that two runs on one machine never meet.
    topology=(--standalone --local_addr=127.0.0.1)
elif ((MAX_RESTARTS > 0)); then
    # Nodes can leave and come back; node 0 keeps the store in which they meet.
    is_host=$((NODE_RANK == 0 ? 1 : 0))
    rdzv_id=${RDZV_ID:-verl-ext-$MASTER_PORT}
    topology=("--nnodes=$NNODES" --rdzv_backend=c10d "--rdzv_endpoint=$MASTER_ADDR:$MASTER_PORT"
        "--rdzv_id=$rdzv_id" "--rdzv_conf=is_host=$is_host")
else
    topology=("--nnodes=$NNODES" "--node_rank=$NODE_RANK" "--master_addr=$MASTER_ADDR" "--master_port=$MASTER_PORT")
fi
if [[ "$standalone" == no && -n "$LOCAL_ADDR" ]]; then topology+=("--local_addr=$LOCAL_ADDR"); fi
if ((MAX_RESTARTS > 0)); then
    topology+=("--max_restarts=$MAX_RESTARTS")
    # Restarted ranks must not find the addresses of earlier ranks, which torchrun's shared store keeps.
    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
fi

line=(torchrun "${topology[@]}" "--nproc_per_node=$NPROC_PER_NODE" -m verl_ext.fsdp_sft_trainer "$@")
if [[ "${DRY_RUN:-0}" != 0 ]]; then
    printf '%q ' "${line[@]}"
    echo
    exit 0
fi

command -v torchrun >/dev/null || fail "torchrun must be on PATH; activate the environment that verl-ext is installed in"
# torchrun reads PET_ variables for options that its command lacks; the command alone says where ranks meet.
unset PET_NNODES PET_NODE_RANK PET_NPROC_PER_NODE PET_MASTER_ADDR PET_MASTER_PORT PET_LOCAL_ADDR PET_MAX_RESTARTS \
    PET_STANDALONE PET_RDZV_BACKEND PET_RDZV_ENDPOINT PET_RDZV_ID PET_RDZV_CONF
export PYTHONUNBUFFERED=1
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} # torchrun's own value, without its warning at every start
export NNODES                                # recipes may derive the packs per step from it
# A scheduler may signal torchrun too, which passes the signal on and gives the ranks this many seconds to save.
export PET_SIGNALS_TO_HANDLE=${PET_SIGNALS_TO_HANDLE:-SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1}
export PET_SHUTDOWN_TIMEOUT=${PET_SHUTDOWN_TIMEOUT:-3600}

# Requests go to the ranks through a file, past torchrun, which would end with an error (verl_ext/trainer/signals.py).
VERL_EXT_REQUESTS=$(mktemp -d "${TMPDIR:-/tmp}/verl-ext-XXXXXX")
export VERL_EXT_REQUESTS VERL_EXT_LAUNCHER=$$ # processes that this script starts end with it (verl_ext/launcher.py)
child='' signalled=''
trap '[[ -z "$child" ]] || kill -TERM "$child"; rm -rf "$VERL_EXT_REQUESTS"' EXIT
trap 'request SIGTERM' TERM
trap 'request SIGINT' INT
trap 'request SIGUSR1' USR1

request() {
    signalled=$1 again=yes
    echo "$1" >>"$VERL_EXT_REQUESTS/stop"
    end_without_ranks
}

# Without a rank to read the request, as in preflight or while torchrun waits for other nodes, the child itself ends.
end_without_ranks() {
    local ranks=unknown
    if [[ -n "$signalled" && -n "$child" ]]; then
        { read -r ranks <"/proc/$child/task/$child/children"; } 2>/dev/null || true # the file has no newline, so read fails
        if [[ -z "$ranks" ]] && kill -TERM "$child" 2>/dev/null; then
            echo "launch/node.sh: $signalled: ended before the first step" >&2
            touch "$VERL_EXT_REQUESTS/unfinished"
        fi
    fi
}

# attend COMMAND…: run it in a process group of its own, so that Ctrl-C is for this script alone; end unless it gives 0
attend() {
    set -m
    "$@" &
    child=$!
    set +m
    end_without_ranks # if a signal came before there was a child
    while :; do       # a signal ends the wait
        again=no status=0
        wait "$child" || status=$?
        [[ "$again" == yes ]] || break
    done
    child=
    if [[ -e "$VERL_EXT_REQUESTS/unfinished" ]]; then status=75; fi
    ((status == 0)) || exit "$status"
}

if ((NNODES > 1)) && [[ "${PREFLIGHT:-1}" != 0 ]]; then
    attend verl-ext preflight "nnodes=$NNODES" "node_rank=$NODE_RANK" "master_addr=$MASTER_ADDR" \
        "master_port=$MASTER_PORT" "processes=$NPROC_PER_NODE" "timeout=${PREFLIGHT_TIMEOUT:-600}" \
        ${LOCAL_ADDR:+"local_addr=$LOCAL_ADDR"} ${rdzv_id:+"rdzv_id=$rdzv_id"} >&2
fi
attend "${line[@]}"
