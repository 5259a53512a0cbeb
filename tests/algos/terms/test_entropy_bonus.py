"""The entropy bonus: its controller step by step, and its state."""

from __future__ import annotations

import pickle

from assay.algos import make_algorithm
from assay.algos.terms.entropy_bonus import EntropyControl


def test_adaptive_entropy_coefficient_grows_below_the_target_and_is_not_applied_above() -> None:
    control = EntropyControl(0.0)
    seen = []
    for entropy in (0.5, 0.19, 0.2, 0.1, 0.3, 0.15):
        control = control.after(entropy, 0.2, 0.005)
        seen.append((round(control.coef, 6), round(control.applied(0.2), 6)))
    assert seen == [(0, 0), (0.005, 0.005), (0.01, 0.01), (0.015, 0.015), (0.01, 0), (0.015, 0.015)]
    assert EntropyControl(0.999).after(0.0, 0.2, 0.005).coef == 1.0
    assert EntropyControl(0.3).applied(0.2) == 0.3  # nothing measured yet


def test_adaptive_entropy_coefficient_follows_the_target_and_is_restored_by_load_state_dict() -> None:
    algo = make_algorithm("grpo", entropy_target=0.2, entropy_coef=0.01, entropy_delta=0.005)
    found = []
    for step, entropy in enumerate((0.1, 0.1, 0.3, 0.1), 1):
        found.append(algo.end_step(step, [], {"policy/entropy": entropy})["policy/entropy_coef"])
        again = make_algorithm("grpo", entropy_target=0.2, entropy_coef=0.01, entropy_delta=0.005)
        again.load_state_dict(algo.state_dict())
        assert again.needs == algo.needs == pickle.loads(pickle.dumps(algo)).needs  # also in a separate process
        algo = again
    assert found == [0.01, 0.015, 0.02, 0.0]  # above the target the bonus is not applied
    assert algo.needs.entropy_gradient and not make_algorithm("grpo", entropy_target=0.2).needs.entropy_gradient
    assert make_algorithm("grpo", entropy_target=0.2).needs.every_rollout  # the controller follows their entropy
    assert make_algorithm("grpo").state_dict() == {} and make_algorithm("grpo").end_step(1, [], {}) == {}
