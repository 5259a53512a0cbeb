
# A requeued job keeps its number, and so its run. Submitted with the name of a run, it goes on with that one.
run=${1:-$name-$SLURM_JOB_ID}
if [ -e "$runs/$run/config.toml" ]; then
    what=(--resume "$runs/$run")
    [ $# -gt 0 ] || what+=(--trust)  # this job began it
else
    what=("$config" --name "$run")
fi

first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
address=$(scontrol show node "$first" | sed -n 's/.*NodeAddr=\([^ ]*\).*/\1/p')
port=$((20000 + SLURM_JOB_ID % 12000)) # one a job, and below those that the system hands out
say() { echo "$(date '+%F %T') $*"; }
say "start ${SLURM_RESTART_COUNT:-0} of $run on $SLURM_JOB_NODELIST, rendezvous at $address:$port"

# One torchrun a node. SIGTERM is for the training processes, which catch it, save and stop together. torchrun has to
# outlive it, because it would give them 30 seconds only. `assay.cli.launch` is torchrun with exit codes: 143 where they
# stopped like that, 200 after an error. Of those of all nodes srun gives the highest.
srun --ntasks-per-node=1 --cpu-bind=none --export=ALL --kill-on-bad-exit=1 --open-mode=append --output="$node_log" \
    bash -c 'trap "" TERM; exec "$@"' node "$python" -m assay.cli.launch \
    --nnodes "$SLURM_JOB_NUM_NODES" --nproc-per-node "$processes" --master-addr "$address" --master-port "$port" \
    -m assay train "${what[@]}" "${settings[@]}" &
step=$!

deadline= again=0
while kill -0 "$step" 2>/dev/null && [ "$SECONDS" -lt "${deadline:-$((SECONDS + 1))}" ]; do
    if [ "$warned" ] && [ "$SECONDS" -ge "$again" ]; then # more than once: processes that just start do not hear it
        [ "$deadline" ] || say "warned of the time limit: the run is asked to save"
        scancel --signal=TERM "$SLURM_JOB_ID" # its steps; srun itself would make a SIGKILL of it
        deadline=${deadline:-$((SECONDS + patience))} again=$((SECONDS + 5))
    fi
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
