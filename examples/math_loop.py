"""REINFORCE as a classic loop on MATH: a policy of your own, one line per action, replay from a buffer on disk.

python examples/math_loop.py [--model FOLDER --task.path FOLDER --replay.load runs/math_buffer]
"""

import sys
from dataclasses import replace

from assay import Group, Policy, Prompt, Trainer
from assay.config.settings import parse_overrides
from assay.types import Message

SHOTS = [("What is the sum of $3$ and $4$?", "3+4=<<3+4=7>>7\nThe answer is \\boxed{7}.")]


class FewShotPolicy(Policy):
    def get_action(self, state, greedy=False, after=None):
        if isinstance(state, Prompt):  # the first action of an episode: show how to write a solution
            pairs = [(Message(role="user", content=q), Message(role="assistant", content=a)) for q, a in SHOTS]
            state = replace(state, messages=(*sum(pairs, ()), *state.messages))
        return super().get_action(state, greedy, after)


class StableReinforce(Trainer):
    def train(self) -> None:
        cfg, env, self.policy = self.training.cfg, self.env(), FewShotPolicy(self.training)
        while self.step < self.steps:
            groups = []
            for state in self.states(cfg.train.prompts):
                env.start(state)
                observation, action, taken, over, total = state, None, [], False, 0.0
                while not over:
                    action = self.policy.get_action(observation, after=action)
                    observation, reward, terminated, truncated, _ = env.step(action.text)
                    taken.append((action, reward))
                    over = terminated or truncated
                for action, reward in reversed(taken):
                    total = reward + cfg.algo.discount * total
                    self.reward(action, total)
                    groups.append(Group(action.prompt, [action]))
            self.credit(groups)
            replayed = self.buffer.sample(cfg.replay.groups, version=self.step, seed=self.seed)
            self.buffer.add(groups)
            self.record(groups, self.update(groups + replayed))
            self.buffer.save("runs/math_buffer")


if __name__ == "__main__":
    task = {"task": "math", "prompt": {}, "name": "math_loop"}
    StableReinforce("configs/seeds/gym_reinforce.toml", {**task, **parse_overrides(sys.argv[1:])}).run()
