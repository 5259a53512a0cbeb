
# A requeued job keeps its number, and so its run. Submitted with the name of a run, it goes on with that one.
run=${1:-$name-$SLURM_JOB_ID}
if [ -e "$runs/$run/config.toml" ]; then
    what=(--resume "$runs/$run")
else
    what=("$config" --name "$run")
fi

first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
address=$(scontrol show node "$first" | sed -n 's/.*NodeAddr=\([^ ]*\).*/\1/p')
port=$((20000 + SLURM_JOB_ID % 12000)) # one a job, and below those that the system hands out
say() { echo "$(date '+%F %T') $*"; }
say "start ${SLURM_RESTART_COUNT:-0} of $run on $SLURM_JOB_NODELIST, rendezvous at $address:$port"

# One torchrun a node. SIGTERM is for the training processes, which catch it, save and stop. All else has to outlive it:
# judges, because the step is finished first, and torchrun, because it would give the others 30 seconds only.
node='
    warned=
    trap "warned=yes" TERM
    (trap "" TERM; exec "$1" -m torch.distributed.run --node-rank "$SLURM_NODEID" "${@:2}") &
    while kill -0 $! 2>/dev/null; do sleep 1; done
    wait $! && exit 0
    [ "$warned" ] && exit 143
    exit 200 # of all codes srun gives the highest: an error on any node outweighs a warning
'
srun --ntasks-per-node=1 --cpu-bind=none --kill-on-bad-exit=1 --open-mode=append --output="$node_log" \
    bash -c "$node" node "$python" \
    --nnodes "$SLURM_JOB_NUM_NODES" --nproc-per-node "$processes" --master-addr "$address" --master-port "$port" \
    --signals-to-handle SIGINT,SIGHUP,SIGQUIT \
    -m assay train "${what[@]}" "${settings[@]}" &
step=$!

deadline=
warn() {
    say "warned of the time limit: the run is asked to save"
    scancel --signal=TERM "$SLURM_JOB_ID" # its steps; srun itself would make a SIGKILL of it
    deadline=$((SECONDS + patience))
}
trap warn USR1
trap : TERM # Slurm takes the job away: how the run ends decides, not this shell
while kill -0 "$step" 2>/dev/null && [ "$SECONDS" -lt "${deadline:-$((SECONDS + 1))}" ]; do
    sleep 1
done
if kill -0 "$step" 2>/dev/null; then
    say "not saved in time"
    code=143
else
    wait "$step"
    code=$?
fi

# Only what was told to stop starts again: no error, and nothing that somebody cancelled.
if [ "$code" -eq 143 ] && [ "$(squeue --noheader --jobs "$SLURM_JOB_ID" --format %T)" = RUNNING ]; then
    say "back to the queue: $run will go on from its last checkpoint"
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
