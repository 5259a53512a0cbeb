"""A custom training loop with replay. Takes 1 to 2 minutes; run in the repository root: python examples/own_loop.py"""

from assay.api import Trainer

SETTINGS = {
    "model": "preset:nano",  # 0.25M parameters, newly initialized
    "task": "examples/my_task.py:SortLetters",
    "algo.recipe": "dr_grpo",  # credit rule and loss; the importance ratio corrects for replayed samples
    "sft": {"steps": 50, "batch": 32, "lr": 3e-3},
    "sampling.max_new_tokens": 8,
    "train.steps": 40,
    "optim": {"lr": 5e-4, "warmup": 5},
    "eval": {"samples": 4, "temperature": 1.0},
    "replay": {"capacity": 64, "max_staleness": 4},
}


class Replayed(Trainer):
    """Each step trains on new answers and on some answers of the last four steps."""

    def train(self) -> None:
        while self.step < self.steps:
            groups = self.sample()  # states -> actions -> rewards, according to the settings
            self.credit(groups)  # rewards -> advantages
            replayed = self.buffer.sample(4, version=self.step, seed=self.seed)
            self.buffer.add(groups)
            metrics = self.learn(groups + replayed)  # gradient step and weight sync
            self.record(groups, metrics | {"replay/size": float(len(self.buffer))})


if __name__ == "__main__":
    trainer = Replayed(settings=SETTINGS)
    summary = trainer.run()
    print(trainer.buffer.summary(trainer.step))
    trainer.buffer.save("runs/own_loop_buffer")  # load with ReplayBuffer.load, or with replay.load in another run
    state = trainer.states(1)[0]
    print(state.question, "->", trainer.policy.get_action(state, greedy=True).text)
    print(f"accuracy {summary['before']['accuracy']:.3f} -> {summary['after']['accuracy']:.3f}")
