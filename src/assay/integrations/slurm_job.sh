
# A requeued job keeps its number and thus its run. Submitted with the name of a run, the job resumes that run.
run=${1:-$name-$SLURM_JOB_ID}
if [ -e "$runs/$run/config.toml" ]; then
    what=(--resume "$runs/$run")
    [ $# -gt 0 ] || what+=(--trust)  # this job started the run
else
    what=("$config" --name "$run")
fi

address_of() { scontrol show node "$1" | sed -n 's/.*NodeAddr=\([^ ]*\).*/\1/p'; }
say() { echo "$(date '+%F %T') $*"; }
running() { [ "$1" ] && kill -0 "$1" 2>/dev/null; }
mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
nodes=$((SLURM_JOB_NUM_NODES - engines)) # the first ones train
address=$(address_of "${hosts[0]}")
port=$((20000 + SLURM_JOB_ID % 12000)) # one per job, below the ephemeral ports of the system
say "start ${SLURM_RESTART_COUNT:-0} of $run on $SLURM_JOB_NODELIST, rendezvous at $address:$port"

# Engine nodes run the servers that the training process asks for through a folder, until their input (file 9) ends.
# SIGTERM has no effect on them and their servers, which the run needs until it has saved.
engine_step=
unset ASSAY_ENGINE_NODES
if [ "$engines" -gt 0 ]; then
    files=$runs/slurm/$SLURM_JOB_NAME-$SLURM_JOB_ID
    export ASSAY_ENGINE_NODES="$files-servers"
    rm -rf "$ASSAY_ENGINE_NODES" && mkdir -m 700 "$ASSAY_ENGINE_NODES"
    mapfile -t addresses < <(for host in "${hosts[@]:nodes}"; do address_of "$host"; done)
    exec 9> >(exec srun --relative="$nodes" --nodes="$engines" --ntasks="$engines" --ntasks-per-node=1 \
        --cpu-bind=none --export=ALL --kill-on-bad-exit=0 --open-mode=append --output="$engine_log" \
        bash -c 'trap "" TERM; exec "$@"' node "$python" -m assay.integrations.slurm engine \
        --servers "$servers" --gpus "$gpus" --logs "$files" "${addresses[@]}")
    engine_step=$!
fi

# One torchrun per node. The training processes handle SIGTERM: they save and stop together. torchrun must ignore it,
# because it would allow them only 30 seconds. `slurm train` is torchrun with exit codes: 143 after such a stop,
# 200 after an error. srun returns the highest exit code of all nodes.
srun --relative=0 --nodes="$nodes" --ntasks="$nodes" --ntasks-per-node=1 \
    --cpu-bind=none --export=ALL --kill-on-bad-exit=1 --open-mode=append --output="$node_log" \
    bash -c 'trap "" TERM; exec "$@"' node "$python" -m assay.integrations.slurm train \
    --nnodes "$nodes" --nproc-per-node "$processes" --master-addr "$address" --master-port "$port" \
    -m assay train "${what[@]}" "${settings[@]}" 9>&- &
step=$!

deadline= again=0
while running "$step" && [ "$SECONDS" -lt "${deadline:-$((SECONDS + 1))}" ]; do
    if [ "$warned" ] && [ "$SECONDS" -ge "$again" ]; then # repeated: starting processes miss the signal
        [ "$deadline" ] || say "the time limit is near: asking the run to save"
        scancel --signal=TERM "$SLURM_JOB_ID" # to its steps; srun itself would send SIGKILL
        deadline=${deadline:-$((SECONDS + patience))} again=$((SECONDS + 5))
    fi
    if [ "$engine_step" ] && ! running "$engine_step"; then
        say "all engine nodes have ended: see $files-engine*.log"
        engine_step=
    fi
    sleep 1
done
if running "$step"; then
    say "not saved in time"
    code=143
else
    wait "$step"
    code=$?
    exec 9>&- # the engine nodes stop their servers
    limit=$((SECONDS + 15))
    while running "$engine_step" && [ "$SECONDS" -lt "$limit" ]; do sleep 1; done
    [ -z "$ASSAY_ENGINE_NODES" ] || rm -rf "$ASSAY_ENGINE_NODES"
fi

# Only a run that was asked to stop is requeued, not after an error or a cancellation.
if [ "$code" -eq 143 ] && [ "$(squeue --noheader --jobs "$SLURM_JOB_ID" --format %T)" = RUNNING ]; then
    say "requeued: $run will resume from its last checkpoint"
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
