"""Settings of evaluations: of a run or a config, then options."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from assay.build.measure import measure_settings


def test_options_replace_settings_of_the_config(tmp_path: Path) -> None:
    config = tmp_path / "train.toml"
    config.write_text(
        '[task]\nname = "jsonl"\npath = "train.jsonl"\nargs = {answer_column = "gold"}\n[env]\nname = "calculator"\n'
        '[prompt]\nstyle = "raw"\ntemplate = "{question} ####"\n[reward]\nextract = "hash"\nwrong = -1\n'
        '[judge]\nurl = "http://127.0.0.1:1"\n[eval]\nfinal_examples = 5\nsamples = 4\n'
    )

    def settings(overrides: dict[str, Any] | None = None, data: str = "") -> Any:
        return measure_settings(["run:none@0"], overrides or {}, data=data, config=config)

    cfg = settings()  # not those of the run
    assert (cfg.task.name, cfg.env.name, cfg.reward.wrong, cfg.eval.samples) == ("jsonl", "calculator", -1, 4)
    assert cfg.judge.url == "http://127.0.0.1:1"  # the config is the user's own
    cfg = settings({"reward.wrong": 0, "prompt": {"system": "Think."}})
    assert (cfg.reward.wrong, cfg.reward.extract) == (0, "hash")
    assert (cfg.prompt.system, cfg.prompt.template, cfg.prompt.style) == ("Think.", "", "auto")
    data = tmp_path / "test.jsonl"
    data.write_text('{"question": "1 + 1", "gold": 2}\n')
    cfg = settings(data=str(data))
    assert (cfg.task.name, cfg.task.path, cfg.task.args) == ("jsonl", str(data), {"answer_column": "gold"})
    assert (cfg.env.name, cfg.reward.wrong, cfg.eval.samples) == ("calculator", -1, 4)
    assert (cfg.eval.final_split, cfg.eval.final_examples) == ("all", 0)
    config.write_text('[task]\nname = "gsm8k"\nargs = {annotations = true}\n[reward]\nwrong = -1\n')
    cfg = settings(data=str(data))
    assert (cfg.task.name, cfg.task.args, cfg.reward.wrong) == ("jsonl", {}, -1)  # gsm8k has another format
