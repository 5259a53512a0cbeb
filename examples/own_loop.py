"""A custom training loop with replay. Takes 1 to 2 minutes; run in the repository root: python examples/own_loop.py"""

import assay

SETTINGS = {
    "model": "preset:nano",  # 0.25M parameters, newly initialized
    "task": "examples/my_task.py:SortLetters",
    "recipe": "dr_grpo",  # credit rule and loss; the importance ratio corrects for replayed samples
    "sft": {"steps": 50, "batch": 32, "lr": 3e-3},
    "max_new_tokens": 8,
    "steps": 40,
    "optim": {"lr": 5e-4, "warmup": 5},
    "eval": {"samples": 4, "temperature": 1.0},
    "replay": {"capacity": 64, "max_staleness": 4},
}


def train(run: assay.Session) -> None:
    """Each step trains on new answers and on some answers of the last four steps."""
    while not run.done():
        groups = run.sample()  # states -> actions -> rewards, according to the settings
        run.credit(groups)  # rewards -> advantages
        replayed = run.buffer.sample(4, version=run.step, seed=run.seed)
        run.buffer.add(groups)
        run.update(groups + replayed)  # gradient step and weight sync
        run.record(groups, {"replay/size": float(len(run.buffer))})


if __name__ == "__main__":
    with assay.session(**SETTINGS, name="own_loop") as run:
        train(run)
    print(run.buffer.summary(run.step))
    run.buffer.save("runs/own_loop_buffer")  # load with ReplayBuffer.load, or with replay.load in another run
    state = run.states(1)[0]
    print(state.question, "->", run.policy.get_action(state, greedy=True).text)
    print(f"accuracy {run.summary['before']['accuracy']:.3f} -> {run.summary['after']['accuracy']:.3f}")
