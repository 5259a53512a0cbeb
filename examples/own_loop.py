"""A loop of one's own, with replay. A minute or two, from the root of the repository: python examples/own_loop.py"""

from assay.api import Trainer

SETTINGS = {
    "model": "preset:nano",  # 0.25M weights, fresh
    "task": "examples/my_task.py:SortLetters",
    "algo.recipe": "dr_grpo",  # credit and loss; its ratio corrects for what an older policy has sampled
    "sft": {"steps": 50, "batch": 32, "lr": 3e-3},
    "sampling.max_new_tokens": 8,
    "train.steps": 40,
    "optim": {"lr": 5e-4, "warmup": 5},
    "eval": {"samples": 4, "temperature": 1.0},
    "replay": {"capacity": 64, "max_staleness": 4},
}


class Replayed(Trainer):
    """Every step learns from new answers and from some of the last four steps."""

    def train(self) -> None:
        while self.step < self.steps:
            groups = self.sample()  # states -> actions -> rewards, as settings say
            self.credit(groups)  # rewards -> advantages
            replayed = self.buffer.sample(4, version=self.step, seed=self.seed)
            self.buffer.add(groups)
            metrics = self.learn(groups + replayed)  # gradient step; the policy acts with new weights from here on
            self.record(groups, metrics | {"replay/size": float(len(self.buffer))})


if __name__ == "__main__":
    algorithm = Replayed(settings=SETTINGS)
    summary = algorithm.run()
    print(algorithm.buffer.summary(algorithm.step))
    algorithm.buffer.save("runs/own_loop_buffer")  # for ReplayBuffer.load, or replay.load of another run
    state = algorithm.states(1)[0]
    print(state.question, "->", algorithm.policy.get_action(state, greedy=True).text)
    print(f"accuracy {summary['before']['accuracy']:.3f} -> {summary['after']['accuracy']:.3f}")
