"""The classic RL loop: start, get_action, step, one action at a time. Takes 30 s: python examples/classic_loop.py"""

from assay import Group, Trainer

SETTINGS = {
    "model": "preset:nano",  # 0.25M parameters, newly initialized
    "env": {"name": "guess", "args": {"high": 4, "tries": 2}, "max_tokens": 1},
    "algo.recipe": "reinforce",  # the baseline is the mean return of the batch
    "train.steps": 80,
    "optim.lr": 2e-3,
    "eval": {"final_examples": 200, "temperature": 1.0},
}


class Classic(Trainer):
    def train(self) -> None:
        env = self.env()
        while self.step < self.steps:
            groups = []
            for state in self.states(16):
                env.start(state)
                observation, action, taken, over, total = state, None, [], False, 0.0
                while not over:
                    action = self.policy.get_action(observation, after=action)
                    observation, reward, terminated, truncated, _ = env.step(action.text)
                    over = terminated or truncated
                    taken.append((action, reward))
                for action, reward in reversed(taken):
                    total = reward + 0.9 * total  # discounted return of this action
                    self.reward(action, total)
                groups += [Group(action.prompt, [action]) for action, _ in taken]
            self.credit(groups)
            self.record(groups, self.update(groups))


if __name__ == "__main__":
    summary = Classic(settings=SETTINGS).run()
    print(f"accuracy {summary['before']['accuracy']:.3f} -> {summary['after']['accuracy']:.3f}")
