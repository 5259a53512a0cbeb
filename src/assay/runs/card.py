"""The model card of an exported model: README.md with results, settings, versions and how to load the model."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from assay.config.settings import toml_value
from assay.runs.console import finite, one_line
from assay.runs.directory import RunFiles, changed_settings, flattened, setting
from assay.types import hide_credentials, plural

MAX_CELL = 200


@dataclass(frozen=True)
class Contents:
    """What was exported. `base`: the model that an adapter is added to. `file`: of GGUF."""

    title: str
    source: str
    files: str  # in words
    versions: Mapping[str, str]
    base: str = ""
    file: str = ""
    notes: Sequence[str] = ()
    location: str = "FOLDER_OR_REPOSITORY"  # from which users load it


def model_card(contents: Contents, run_path: Path | None = None, step: int = 0) -> str:
    """`run_path`, `step`: the checkpoint, if the model comes from a run."""
    sections = [front_matter(contents, run_path), f"# {contents.title}"]
    if run_path is None:
        sections.append(f"Exported with [assay](https://pypi.org/project/assay-rl) from `{contents.source}`.")
    else:
        sections += run_sections(RunFiles(run_path), step)
    sections += ["## Files", "\n".join([f"{contents.files}.", *(f"\n{note}." for note in contents.notes)])]
    sections += ["## Use", usage(contents), "## Versions of the export", version_list(contents.versions)]
    return "\n\n".join(sections) + "\n"


def front_matter(contents: Contents, run_path: Path | None) -> str:
    library = "peft" if contents.base else "gguf" if contents.file else "transformers"
    lines = ["---", f"library_name: {library}", "pipeline_tag: text-generation"]
    base = contents.base or (hub_id(setting(RunFiles(run_path).config(), "model.source")) if run_path else "")
    if base:
        lines.append(f"base_model: {toml_value(base)}")
    tags = ["assay", *(["reinforcement-learning", "rlvr"] if run_path else [])]
    return "\n".join([*lines, "tags:", *(f"- {tag}" for tag in tags), "---"])


def hub_id(source: Any) -> str:
    """The name of a model on the hub; empty for other sources."""
    is_hub = isinstance(source, str) and re.fullmatch(r"[\w.-]+/[\w.-]+", source) and not Path(source).exists()
    return source if is_hub else ""


def run_sections(files: RunFiles, step: int) -> list[str]:
    config, summary = files.config(), files.document("summary.json")
    flat = flattened(config)
    task, recipe, model = (flat.get(key, "") for key in ("task.name", "algo.recipe", "model.source"))
    trained = (
        f"Trained with assay from {code(model)} on the task {code(task)} ({code(recipe)}), {plural(step, 'step')}."
    )
    sections = [trained, "## Results", results(files, summary, step)]
    lines = [f"{key} = {toml_value(value)}" for key, value, _ in changed_settings(config)]
    environment = files.document("environment.json").get("versions")
    sections += ["## Settings", "Settings of the run that differ from the defaults:", fenced("toml", lines)]
    if isinstance(environment, dict):
        sections += ["## Versions of the training", version_list(environment)]
    return sections


def results(files: RunFiles, summary: Mapping[str, Any], step: int) -> str:
    """Accuracies that belong to the exported step: of the summary, if it is the first or last, else of validation."""
    rows = []
    before, after, paired = (summary.get(key) or {} for key in ("before", "after", "paired"))
    split, name = summary.get("split"), f"after {plural(step, 'step')}"
    if before:
        rows.append(cells("before", split, before["accuracy"], before["ci95"], before["n"]))
    is_final = bool(after) and summary.get("steps") == step
    if is_final:
        rows.append(cells(name, split, after["accuracy"], after["ci95"], after["n"]))
    elif (row := measured(files, step)) is not None:
        ends = [row.get("eval/low"), row.get("eval/high")]
        rows.append(cells(name, "validation during training", row["eval/accuracy"], ends, None))
    if not rows:
        return "The run has no evaluation of these weights."
    table = ["| | split | accuracy | 95 % interval | problems |", "|---|---|---|---|---|", *rows]
    if is_final and paired:
        table += ["", paired_test(after["accuracy"] - before["accuracy"], paired)]
    elif not is_final and step:
        table += ["", "These weights were not evaluated after the training: there is no paired test."]
    return "\n".join(table)


def measured(files: RunFiles, step: int) -> Mapping[str, Any] | None:
    """The line of metrics with the evaluation during training at a step."""
    rows = [row for row in files.metrics() if row["step"] == step and finite(row, "eval/accuracy") is not None]
    return rows[-1] if rows else None


def cells(name: str, split: Any, accuracy: float, ends: Sequence[Any], problems: int | None) -> str:
    known = all(isinstance(end, int | float) for end in ends)
    interval = " to ".join(f"{100 * end:.1f}" for end in ends) + " %" if known else ""
    return f"| {name} | {split} | {100 * accuracy:.1f} % | {interval} | {'' if problems is None else problems} |"


def paired_test(difference: float, paired: Mapping[str, Any]) -> str:
    return (
        f"{100 * difference:+.1f} points on the same problems: {paired['gained']} gained, {paired['lost']} "
        f"lost, paired p = {paired['p_value']:.2g}. One run with one seed."
    )


def usage(contents: Contents) -> str:
    location = toml_value(contents.location)
    if contents.file:
        chat = f"assay chat {contents.file}"
        return fenced("bash", [chat, f"llama-cli -m {contents.file}  # if the notes above do not exclude it"])
    imports = ["from transformers import AutoModelForCausalLM, AutoTokenizer", ""]
    model = [f"model = AutoModelForCausalLM.from_pretrained({location})"]
    if contents.base:
        imports.insert(0, "from peft import PeftModel")
        model = [
            f"base = AutoModelForCausalLM.from_pretrained({contents.base!r})",
            f"model = PeftModel.from_pretrained(base, {location})",
        ]
    code = fenced("python", [*imports, *model, f"tokenizer = AutoTokenizer.from_pretrained({location})"])
    return code if contents.base else f"{code}\n\nWith assay: `assay chat {contents.location}`."


def version_list(versions: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items())


def code(text: Any) -> str:
    shown = one_line(hide_credentials(str(text)), MAX_CELL).replace("`", "'")
    return f"`{shown}`" if shown else "unknown"


def fenced(language: str, lines: Sequence[str]) -> str:
    """A block of code; the fence is longer than any in the lines."""
    text = hide_credentials("\n".join(lines))
    fence = "```"
    while fence in text:
        fence += "`"
    return f"{fence}{language}\n{text}\n{fence}"
