"""What a run records of a step: rollout files with the log-probabilities of trainer and reference."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from small_run import SmallRuns
from transformers import AutoModelForCausalLM

from assay.runs.rollouts import read_arrays, read_rollouts

TEMPERATURE = 0.7


def expected_logprobs(model_folder: Path, arrays: dict[str, np.ndarray]) -> np.ndarray:
    """Log-probabilities of all tokens by transformers, aligned with `token_ids`; NaN for tokens outside of the mask."""
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    expected = np.full(len(arrays["token_ids"]), np.nan, np.float32)
    for start, end in zip(arrays["offsets"], arrays["offsets"][1:], strict=False):
        ids = torch.from_numpy(arrays["token_ids"][start:end]).long()
        with torch.no_grad():
            logprobs = (model(ids[None]).logits[0, :-1] / TEMPERATURE).log_softmax(-1)
        expected[start + 1 : end] = logprobs.gather(1, ids[1:, None]).squeeze(1)
    expected[arrays["loss_mask"] == 0] = np.nan
    return expected


@pytest.mark.parametrize(
    "changes, reference",
    [
        (["--algo.kl_coef", 0.1], True),  # computed in the loss
        (["--algo.reward_kl_coef", 0.1, "--algo.recompute_logprobs", "true", "--algo.updates", 2], True),
        (["--train.token_budget", 30], False),  # several micro-batches
    ],
)
@pytest.mark.usefixtures("no_curves")
def test_rollout_files_hold_logprobs_of_the_weights_before_the_step(
    tmp_path: Path, changes: list[object], reference: bool
) -> None:
    small = SmallRuns(tmp_path)
    every_step = ("--save.every", 1, "--save.keep", 9, "--sampling.temperature", TEMPERATURE)
    assert small.train(*every_step, *changes) == 0
    for step in (1, 2):
        arrays = read_arrays(small.runs / "small", step)
        expected = expected_logprobs(small.checkpoint(step - 1) / "model", arrays)
        trained = ~np.isnan(arrays["trainer_logprobs"])
        in_mask = arrays["loss_mask"] == 1
        with_gradient = in_mask & (arrays["advantages"] != 0).repeat(np.diff(arrays["offsets"]))
        assert with_gradient.any() and trained[with_gradient].all() and not trained[~in_mask].any()
        np.testing.assert_allclose(arrays["trainer_logprobs"][trained], expected[trained], atol=2e-5)
        assert ("ref_logprobs" in arrays) == reference
        if reference:
            known = ~np.isnan(arrays["ref_logprobs"])
            expected = expected_logprobs(small.checkpoint(0) / "model", arrays)
            np.testing.assert_allclose(arrays["ref_logprobs"][known], expected[known], atol=2e-5)
            assert (known >= trained).all()
        rollouts = [rollout for group in read_rollouts(small.runs / "small", step) for rollout in group.rollouts]
        stored = [value for r in rollouts if r.trainer_logprobs is not None for value in r.trainer_logprobs]
        assert stored == arrays["trainer_logprobs"][trained].tolist()
