"""Where rows come from: a folder with a file for each split, one file, a Hugging Face dataset, or a list in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from assay.tasks.files import DataRow, listed, parse_object, read_jsonl, read_text
from assay.types import UserError

SPLIT_STEMS = {"train": ("train",), "validation": ("validation", "valid", "val", "dev"), "test": ("test",)}
MANIFEST = "manifest.json"  # written beside prepared files


class Source(Protocol):
    whole: bool  # it knows no splits: whatever the split, `read` gives all of it

    def read(self, split: str) -> list[DataRow] | None:
        """The rows of a split, or None if the source has no such split."""

    def describe(self) -> str: ...


class FileSource:
    whole = True

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self, split: str) -> list[DataRow]:
        return read_jsonl(self.path)

    def describe(self) -> str:
        return str(self.path)


class ListSource:
    """Rows in memory: a list of them, or a mapping from splits to lists."""

    def __init__(self, rows: Sequence[Any] | Mapping[str, Sequence[Any]], name: str) -> None:
        self.rows, self.name = rows, name
        self.whole = not isinstance(rows, Mapping)

    def read(self, split: str) -> list[DataRow] | None:
        rows = self.rows.get(split) if isinstance(self.rows, Mapping) else self.rows
        if rows is None:
            return None
        if not rows:
            raise UserError(f"{self.name} gave no rows")
        for index, row in enumerate(rows):
            if not isinstance(row, Mapping):
                raise UserError(f"{self.name} must give dict rows or Prompts, but row {index} is {type(row).__name__}")
        return [DataRow(row, f"{self.name}[{index}]", str(index)) for index, row in enumerate(rows)]

    def describe(self) -> str:
        return self.name


class FolderSource:
    """train.jsonl, validation.jsonl, test.jsonl (or the only test*.jsonl); or one .json file a problem below train/."""

    whole = False

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self, split: str) -> list[DataRow] | None:
        for stem in SPLIT_STEMS[split]:
            if (self.path / f"{stem}.jsonl").is_file():
                return read_jsonl(self.path / f"{stem}.jsonl")
            if (self.path / stem).is_dir():
                return self._read_tree(self.path / stem)
        numbered = sorted(self.path.glob("test*.jsonl")) if split == "test" else []
        if len(numbered) > 1:
            raise UserError(
                f"{self.path} has several test files ({listed(f.name for f in numbered)}): name one as the path"
            )
        return read_jsonl(numbered[0]) if numbered else None

    def _read_tree(self, folder: Path) -> list[DataRow]:
        files = sorted(folder.rglob("*.json"), key=lambda file: (file.parent, len(file.stem), file.stem))
        if not files:
            raise UserError(f"{folder} holds no .json files")
        keys = [file.relative_to(folder).with_suffix("").as_posix() for file in files]
        return [
            DataRow(parse_object(read_text(file), str(file)), str(file), key)
            for file, key in zip(files, keys, strict=True)
        ]

    def describe(self) -> str:
        return str(self.path)


class HubSource:
    """A dataset of the Hugging Face hub: for each split the dataset's name, its configurations and its split."""

    whole = False

    def __init__(self, parts: Mapping[str, tuple[str, Sequence[str | None], str]]) -> None:
        self.parts = parts

    def read(self, split: str) -> list[DataRow] | None:
        if split not in self.parts:
            return None
        dataset, configurations, hub_split = self.parts[split]
        rows = [row for name in configurations for row in load_hub(dataset, name, hub_split)]
        return [DataRow(row, f"{dataset} {hub_split}[{index}]", str(index)) for index, row in enumerate(rows)]

    def describe(self) -> str:
        return " + ".join(sorted({dataset for dataset, _, _ in self.parts.values()}))


def load_hub(dataset: str, configuration: str | None, split: str) -> list[dict[str, Any]]:
    advice = "or give path=FOLDER with train.jsonl and test.jsonl"
    try:
        import datasets  # type: ignore[import-not-found,import-untyped,unused-ignore]
    except ImportError:
        raise UserError(
            f'reading "{dataset}" from the Hugging Face hub needs the hub extra: pip install "assay[hub]", {advice}'
        ) from None
    try:
        return list(datasets.load_dataset(dataset, configuration, split=split))
    except Exception as error:  # the library raises many kinds, from several packages, when the hub cannot be reached
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise UserError(
            f'cannot read "{dataset}" from the Hugging Face hub ({reason}): check the network, {advice}'
        ) from (error)


def open_source(path: str | None, hub: HubSource | None = None, hub_names: Sequence[str] = ()) -> Source:
    """A local folder or file if there is one of this name; the hub if the path is None or names the hub's dataset."""
    if path is not None and Path(path).is_dir():
        return FolderSource(Path(path))
    if path is not None and Path(path).is_file():
        return FileSource(Path(path))
    if hub is not None and (path is None or path in hub_names):
        return hub
    if path is None:
        raise UserError("this task needs a path: a JSONL file, or a folder with train.jsonl and test.jsonl")
    raise UserError(
        f"there is no file or folder {path}: give a JSONL file, or a folder with train.jsonl and test.jsonl"
    )


def manifest_of(path: str | None) -> dict[str, Any]:
    """The manifest beside a prepared file or in a prepared folder; empty if there is none that names the file."""
    if path is None:
        return {}
    folder = Path(path) if Path(path).is_dir() else Path(path).parent
    if not (folder / MANIFEST).is_file():
        return {}
    manifest = parse_object(read_text(folder / MANIFEST), str(folder / MANIFEST))
    prepared = folder == Path(path) or Path(path).name in manifest.get("files", {})
    return manifest if prepared else {}
