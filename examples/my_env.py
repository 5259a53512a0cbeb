"""A custom environment: say a word backwards, one letter at a time."""

import random

from assay.envs import Env

WORDS = ["cat", "ape", "pet", "tea", "ace", "cap", "tap", "pat", "act", "eat"]


class Backwards(Env):
    name = "backwards"
    max_steps = 4  # three letters, and one wrong action

    def reset(self, *, seed=None, options=None):
        self.left = random.Random(seed).choice(WORDS)
        return f"Say {' '.join(self.left)} backwards , a letter at a time .", {}

    def step(self, action):
        if action.strip() != self.gold_action():
            return "No .", 0.0, False, False, {}
        self.left = self.left[:-1]
        return "Yes .", 1 / 3, not self.left, False, {}

    def gold_action(self):
        return self.left[-1:]

    def words(self):
        return ["Say", "backwards", ",", "letter", "at", "time", ".", "No", "Yes", *"acept"]
