"""Write a model as a Hugging Face folder with a model card, a GGUF file or an adapter for PEFT, and upload it."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, FileSystemLoader

from assay.config.settings import toml_value
from assay.runs import checkpoints, rollouts
from assay.runs.console import Console, count, finite, one_line
from assay.runs.directory import RunFiles, changed_settings, flattened, is_run, setting
from assay.runs.environment import versions
from assay.runs.files import rename, sync_tree
from assay.runs.resolve import PREFIX, load_resolved
from assay.types import UserError, describe_error, hide_credentials, plural

if TYPE_CHECKING:
    from assay.models import PolicyModel
    from assay.models.base import LoadReport
    from assay.models.gguf import Greedy
    from assay.text import Tokenizer

CARD = "README.md"
ADAPTER = "adapter"  # in a checkpoint of a run with LoRA
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
BASE = "base"  # in such a run: the model that the adapters are added to
PROMPTS = ("What is 17 + 25?", "Name three colors.", "Write a sentence about the sea.", "def add(a, b):")
NEW_TOKENS = 16  # of each greedy continuation that is compared
WEIGHTS = ("model*.safetensors", "model.safetensors.index.json")  # files in a repository that new weights replace


DTYPES, GGUF_TYPES, LORA = ("float32", "bfloat16"), ("f16", "q8_0"), ("merge", "keep")  # choices, the usual first


@dataclass(frozen=True)
class Export:
    """What is written, and where; None: the usual choice."""

    source: str
    dest: Path
    runs_dir: Path = Path("runs")
    dtype: str | None = None  # of a Hugging Face folder
    gguf: str | None = None
    lora: str = "merge"  # or keep: adapters of a run stay adapters
    push: str | None = None  # OWNER/NAME on the Hugging Face hub
    private: bool = False


def export(options: Export, console: Console) -> dict[str, Any]:
    """Carry out an export; returns facts about it."""
    check_options(options)
    check_destination(options.dest)
    repository = None
    if options.push and options.lora == "keep":
        load_resolved(options.source, options.runs_dir, check_public_base)
    if options.push:  # first: wrong names and missing rights are found before minutes of work
        repository = HubRepository(options.push, options.private)
    write = export_adapter if options.lora == "keep" else export_gguf if is_gguf(options) else export_folder
    facts = {"source": options.source, "dest": str(options.dest), **write(options, console)}
    if repository is not None:
        console.announce(f"uploading to {repository.name}")
        replaced = () if is_gguf(options) or options.lora == "keep" else WEIGHTS
        try:
            facts["pushed"] = repository.upload(options.dest, replaced)
        except UserError as error:
            command = shlex.join(["hf", "upload", repository.name, str(options.dest)])
            raise UserError(f"{error}; {options.dest} is complete: upload it later with {command}") from error
    return facts


def is_gguf(options: Export) -> bool:
    return bool(options.gguf) or is_file(options.dest)


def is_file(dest: Path) -> bool:
    return dest.suffix.lower() == ".gguf"


def check_options(options: Export) -> None:
    for name, value, known in (
        ("dtype", options.dtype or DTYPES[0], DTYPES),
        ("gguf", options.gguf or GGUF_TYPES[0], GGUF_TYPES),
        ("lora", options.lora, LORA),
    ):
        if value not in known:
            raise UserError(f"{name} = {value!r} is unknown: choose {' or '.join(known)}")
    if options.dtype and (is_gguf(options) or options.lora == "keep"):
        raise UserError("--dtype is for Hugging Face folders: remove it, or remove --gguf and --lora keep")
    if options.lora == "keep" and is_gguf(options):
        raise UserError("a GGUF file has merged weights: remove --lora keep, or export to a folder without --gguf")
    if options.lora == "keep" and not options.source.startswith(PREFIX):
        raise UserError(f"--lora keep is for runs with LoRA (run:NAME@best), not for {options.source}")
    if options.push and is_file(options.dest):
        raise UserError(f"--push uploads a folder: give a folder and --gguf f16 or q8_0 instead of {options.dest}")
    if options.private and not options.push:
        raise UserError("--private is for --push OWNER/NAME: add it, or remove --private")


def check_destination(dest: Path) -> None:
    if dest.name in ("", ".."):
        raise UserError(f"the model cannot be written to '{dest}' itself: name a new folder, e.g. {dest / 'my-model'}")
    if is_file(dest):
        if dest.exists():
            raise UserError(f"{dest} exists already: choose a new name")
        return
    if dest.is_dir() and any(dest.iterdir()):
        raise UserError(f"{dest} is not empty: choose a new folder")
    if dest.exists() and not dest.is_dir():
        raise UserError(f"{dest} is a file: choose a new folder")


@contextmanager
def writing(dest: Path) -> Iterator[Path]:
    """A folder to fill, which becomes the destination when it is complete; for a file, the file in it."""
    unfinished = dest.with_name(f".{dest.name}.unfinished")
    try:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        yield unfinished
        sync_tree(unfinished)
        rename(unfinished / dest.name if is_file(dest) else unfinished, dest)  # fails for a folder that is not empty
    except OSError as error:
        raise UserError(f"cannot write {dest} ({error.strerror or error}): choose another folder") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def export_folder(options: Export, console: Console) -> dict[str, Any]:
    import torch

    from assay.models import save_model

    dtype = options.dtype or DTYPES[0]
    model, tokenizer, checkpoint = load_model_of(options, console)
    with writing(options.dest) as folder:
        console.announce(f"writing {options.dest}")
        eos, pad, bos = tokenizer.eos_ids, tokenizer.pad_id, tokenizer.bos_id
        save_model(model, folder, getattr(torch, dtype), eos_ids=eos, pad_id=pad, bos_id=bos)
        tokenizer.save(folder)
        write_card(folder, checkpoint, options, f"A Hugging Face folder with weights in {dtype}")
    return {"format": dtype}


def export_gguf(options: Export, console: Console) -> dict[str, Any]:
    from assay.models.gguf import check_writable, greedy, save_gguf
    from assay.text.tokenizer import gguf_metadata

    kind = options.gguf or "f16"
    model, tokenizer, checkpoint = load_model_of(options, console)
    rows = check_writable(model).vocab_size
    metadata = {"general.name": options.dest.stem, **gguf_metadata(tokenizer, rows)}
    with writing(options.dest) as folder:
        console.announce(f"writing {options.dest}")
        file = folder / (options.dest.name if is_file(options.dest) else f"{options.dest.name}-{kind}.gguf")
        save_gguf(model, file, kind, metadata)
        console.announce(f"comparing {options.dest} with {options.source}")
        expected = greedy(model, sample_prompts(tokenizer, checkpoint), NEW_TOKENS)
        del model  # the file is loaded into the same memory
        notes = [agreement(expected, file)]
        if metadata["tokenizer.ggml.model"] == "none":
            notes.append(
                "llama.cpp does not know this tokenizer: it can load the weights only, assay also the tokenizer"
            )
        if not is_file(options.dest):
            files = f"A GGUF file with weights in {kind}"
            write_card(folder, checkpoint, options, files, file=file.name, notes=notes)
    return {"format": kind, "notes": notes}


def export_adapter(options: Export, console: Console) -> dict[str, Any]:
    files, tokenizer, checkpoint = load_resolved(options.source, options.runs_dir, load_adapter)
    base = base_of(files)
    with writing(options.dest) as folder:
        for name, content in files.items():
            (folder / name).write_bytes(content)
        tokenizer.save(folder)
        write_card(folder, checkpoint, options, "A LoRA adapter for PEFT, with the tokenizer", base=base)
    return {"format": f"adapter of {base}"}


def load_model_of(options: Export, console: Console) -> tuple[PolicyModel, Tokenizer, Path | None]:
    with console.loading(options.source) as report:
        return load_resolved(options.source, options.runs_dir, partial(load, report=report))


def load(source: str, report: LoadReport) -> tuple[PolicyModel, Tokenizer, Path | None]:
    """Model, tokenizer, and the folder of the checkpoint of a run if there is one.

    Loads in float32, so that weights are rounded only once. `report`: see `load_model`.
    """
    import torch

    from assay.models import load_model
    from assay.text import load_tokenizer

    model = load_model(source, device=torch.device("cpu"), dtype=torch.float32, report=report)
    folder = Path(source).absolute().parent
    is_checkpoint = checkpoints.is_complete(folder) and is_run(folder.parent.parent)
    return model, load_tokenizer(source), folder if is_checkpoint else None


def check_public_base(source: str) -> None:
    base = base_of(load_adapter(source)[0])
    if Path(base).expanduser().is_dir():
        raise UserError(f"cannot push: the base of the adapter, {base}, is only on this machine: merge the adapter")


def base_of(files: Mapping[str, bytes]) -> str:
    return str(json.loads(files[ADAPTER_FILES[0]])["base_model_name_or_path"])


def load_adapter(source: str) -> tuple[dict[str, bytes], Tokenizer, Path]:
    """Files of the adapter, tokenizer, and the folder of the checkpoint.

    The base of a model that was built from a preset, or read from a GGUF file, is the copy in the run: PEFT loads
    neither.
    """
    from assay.text import load_tokenizer

    checkpoint = Path(source).parent
    folder = checkpoint / ADAPTER
    if not folder.is_dir():
        raise UserError(f"{checkpoint} has no adapter, because the run does not use LoRA: it cannot be kept")
    if damage := checkpoints.problems(checkpoint, ADAPTER):
        raise UserError(f"{damage[0]}: choose another step")
    files = {name: (folder / name).read_bytes() for name in ADAPTER_FILES}
    base = base_of(files)
    if ":" in base or base.lower().endswith(".gguf"):
        config = json.loads(files[ADAPTER_FILES[0]])
        config["base_model_name_or_path"] = str((checkpoint.parent.parent / BASE).resolve())
        files[ADAPTER_FILES[0]] = (json.dumps(config, indent=2) + "\n").encode()
    return files, load_tokenizer(source), checkpoint


def write_card(folder: Path, checkpoint: Path | None, options: Export, files: str, **more: Any) -> None:
    """`files`: what was exported, in words. `more`: of `Contents`."""
    title = (options.push or options.dest.name).rpartition("/")[2]
    if options.push:
        more["location"] = options.push
    contents = Contents(title, options.source, files, versions(), **more)
    run = (checkpoint.parent.parent, checkpoints.step_of(checkpoint)) if checkpoint else ()
    (folder / CARD).write_text(model_card(contents, *run), encoding="utf-8")


def sample_prompts(tokenizer: Tokenizer, checkpoint: Path | None) -> Sequence[Sequence[int]]:
    """A few prompts of the run as they were sampled, or else some questions."""
    if checkpoint and (steps := rollouts.rollout_steps(checkpoint.parent.parent)):
        groups = rollouts.read_rollouts(checkpoint.parent.parent, steps[-1])
        return [group.rollouts[0].turns[0].context_ids for group in groups[: len(PROMPTS)]]
    texts: Sequence[str] = PROMPTS
    if tokenizer.has_chat_template:
        texts = [tokenizer.chat_text([{"role": "user", "content": text}], open_reply=True) for text in texts]
    return [tokenizer.encode(text) for text in texts]


def agreement(expected: Greedy, file: Path) -> str:
    import torch

    from assay.models import load_model

    equal, difference = expected.compare(load_model(str(file), device=torch.device("cpu"), dtype=torch.float32))
    return (
        f"greedy decoding: {count(equal)} of {count(expected.tokens)} tokens as before the rounding "
        f"({len(expected.sequences)} prompts), logits differ by at most {difference:.2g}"
    )


# The model card: README.md with results, settings, versions and how to load the model (model_card.md.jinja)

MAX_CELL = 200
SHOWN = {"model": "model.source", "task": "task.name", "recipe": "algo.recipe"}  # settings in its first line


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
    made = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    made.filters |= {"toml": toml_value, "code": code, "fenced": fenced, "listed": listed}
    run = None if run_path is None else run_facts(RunFiles(run_path), step)
    base = contents.base or (hub_id(run["model"]) if run else "")
    return made.get_template("model_card.md.jinja").render(contents=contents, base=base, run=run)


def hub_id(source: Any) -> str:
    """The name of a model on the hub; empty for other sources."""
    is_hub = isinstance(source, str) and re.fullmatch(r"[\w.-]+/[\w.-]+", source) and not Path(source).exists()
    return source if is_hub else ""


def run_facts(files: RunFiles, step: int) -> dict[str, Any]:
    """What the card says about the run."""
    config, versions = files.config(), setting(files.document("environment.json"), "versions")
    flat = flattened(config)
    summary = files.document("summary.json")
    learned = summary.get("algorithm") != "sft"  # else only fine-tuned on solutions
    steps = plural(step if learned else int(setting(summary.get("sft"), "steps") or 0), "step")
    rows, test = results(files, summary, step, f"after {steps}")
    shown = {key: flat.get(name, "") for key, name in SHOWN.items()}
    return {
        **(shown if learned else shown | {"recipe": "sft"}),
        "by_rewards": learned,
        "steps": steps,
        "results": rows,
        "test": test,
        "settings": [f"{key} = {toml_value(value)}" for key, value, _ in changed_settings(config)],
        "versions": versions if isinstance(versions, dict) else {},
    }


def results(files: RunFiles, summary: Mapping[str, Any], step: int, name: str) -> tuple[list[dict[str, Any]], str]:
    """Accuracies that belong to the exported step: of the summary, if it is the first or last, else of validation.

    Also what is known about their difference.
    """
    rows = []
    before, after, paired = (summary.get(key) or {} for key in ("before", "after", "paired"))
    split = summary.get("split")
    if before:
        rows.append(cells("before", split, before["accuracy"], before["ci95"], before["n"]))
    is_final = bool(after) and summary.get("steps") == step
    if is_final:
        rows.append(cells(name, split, after["accuracy"], after["ci95"], after["n"]))
    elif evaluated := [
        row for row in files.readable_metrics() if row["step"] == step and finite(row, "eval/accuracy") is not None
    ]:
        row = evaluated[-1]
        ends = [row.get("eval/low"), row.get("eval/high")]
        rows.append(cells(name, "validation during training", row["eval/accuracy"], ends))
    if is_final and paired:
        gain, changed = after["accuracy"] - before["accuracy"], f"{paired['gained']} gained, {paired['lost']} lost"
        test = f"{100 * gain:+.1f} points on the same problems: {changed}, paired p = {paired['p_value']:.2g}."
        return rows, f"{test} One run with one seed."
    if rows and step and not is_final:
        return rows, "These weights were not evaluated after the training: there is no paired test."
    return rows, ""


def cells(name: str, split: Any, accuracy: float, ends: Sequence[Any], problems: object = "") -> dict[str, Any]:
    known = all(isinstance(end, int | float) for end in ends)
    interval = " to ".join(f"{100 * end:.1f}" for end in ends) + " %" if known else ""
    return {"name": name, "split": split, "accuracy": accuracy, "interval": interval, "problems": problems}


def listed(versions: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items())


def code(text: Any) -> str:
    shown = one_line(hide_credentials(str(text)), MAX_CELL).replace("`", "'")
    return f"`{shown}`" if shown else "unknown"


def fenced(lines: Sequence[str], language: str) -> str:
    """A block of code; the fence is longer than any in the lines."""
    text = hide_credentials("\n".join(lines))
    fence = "```"
    while fence in text:
        fence += "`"
    return f"{fence}{language}\n{text}\n{fence}"


# Upload to the Hugging Face hub (or HF_ENDPOINT), with the token of `hf auth login` or HF_TOKEN

DENIED = (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN, HTTPStatus.NOT_FOUND)  # 404: a private repository of others


class HubRepository:
    """A model repository that exists and may be written to. A missing one is created."""

    def __init__(self, name: str, private: bool) -> None:
        if not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
            raise UserError(f"--push {name}: give OWNER/NAME, e.g. my-user/my-model")
        from huggingface_hub import HfApi, get_token

        self.name = name
        self.api = HfApi(endpoint=os.environ.get("HF_ENDPOINT"))
        with one_line_errors(self):
            if get_token() is None:
                raise UserError("--push needs a token of the Hugging Face hub: run hf auth login, or set HF_TOKEN")
            self.api.create_repo(name, private=private or None, exist_ok=True)

    def upload(self, folder: Path, replaced: tuple[str, ...]) -> str:
        """Add the files of the folder in one commit, and return its address.

        `replaced`: patterns of files in the repository that the new ones replace, such as shards of older weights.
        """
        with one_line_errors(self):
            done = self.api.upload_folder(
                repo_id=self.name,
                folder_path=folder,
                commit_message="Upload from assay export",
                delete_patterns=list(replaced),
            )
        return str(done.commit_url)


@contextmanager
def one_line_errors(repository: HubRepository) -> Iterator[None]:
    from huggingface_hub.errors import HfHubHTTPError

    name, endpoint = repository.name, repository.api.endpoint
    try:
        yield
    except UserError:
        raise
    except HfHubHTTPError as error:
        status = error.response.status_code
        if status in DENIED:
            reason = f"the token may not write to {name}: check the name, and that the token has the role write"
        else:
            reason = f"{endpoint} refused {name} (HTTP {status}, {error.server_message or 'no reason given'})"
        raise UserError(f"--push: {reason}") from error
    except Exception as error:  # network errors have the classes of the library's HTTP client, which changes
        advice = "check the network, HF_ENDPOINT and HF_HUB_OFFLINE"
        raise UserError(
            f"--push: {name} cannot be written at {endpoint} ({describe_error(error)}): {advice}"
        ) from error
