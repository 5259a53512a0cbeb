"""Runs `assay` in forked children that die at a chosen file operation.

`python kill_server.py` imports everything once, then reads one JSON request per line and answers each with one line.
Forking spares each child the imports, which take several times as long as the run itself.
"""

from __future__ import annotations

import builtins
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

CHANGING = {"os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate"}
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


@dataclass
class Request:
    """One process of a run: `words` for the command line, in the folder `cwd`; killed at event `die_at` (from 1)."""

    cwd: str
    words: list[str]
    die_at: int = 0  # 0: it is not killed


@dataclass
class Result:
    code: int
    events: list[str] = field(default_factory=list)  # operation and path, if the process was not killed
    said: str = ""
    volatile: list[str] = field(default_factory=list)  # what a power failure could have undone, see `Durability`


class KillServer:
    """The client: a server process and its pipes."""

    def __init__(self) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        self.process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def run(self, cwd: Path, *words: object, die_at: int = 0) -> Result:
        assert self.process.stdin is not None and self.process.stdout is not None
        request = Request(str(cwd), [str(word) for word in words], die_at)
        self.process.stdin.write(json.dumps(asdict(request)) + "\n")
        self.process.stdin.flush()
        return Result(**json.loads(self.process.stdout.readline()))

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()


class Durability:
    """Tracks what a power failure could undo: contents and names that were not flushed by fsync of file or folder."""

    def __init__(self, root: str) -> None:
        self.root = root
        self.pending: set[str] = set()  # files and folders that were not flushed
        self.renamed = ""  # the folder of the last rename, until it is flushed
        self.found: list[str] = []

    def install(self) -> None:
        fsync = os.fsync

        def fsync_followed(descriptor: int) -> None:
            fsync(descriptor)
            path = os.readlink(f"/proc/self/fd/{descriptor}")
            self.pending.discard(path)
            self.renamed = "" if self.renamed == path else self.renamed

        os.fsync = fsync_followed  # type: ignore[assignment]

    def changes(self, what: str, path: str, target: str = "") -> None:
        """Called before the operation."""
        path = os.path.abspath(path)
        if self.renamed:
            self.found.append(f"{what} {path} before the rename in {self.renamed} is confirmed")
        if what in ("write", "half of"):
            self.pending |= {path, *(() if os.path.exists(path) else [os.path.dirname(path)])}
        elif what in ("open", "os.mkdir"):
            self.pending.add(os.path.dirname(path))
        elif what == "os.rename":
            target = os.path.abspath(target)
            folder = os.path.dirname(target)
            if re.fullmatch(r"step-\d+", os.path.basename(target)):  # a checkpoint is renamed
                unconfirmed = {name for name in self.pending - {folder} if not name.endswith(".lock")}
                self.found += [f"{name} when {target} gets its name" for name in sorted(unconfirmed)]
            self.pending = {re.sub(rf"^{re.escape(path)}(?=/|$)", target, name) for name in self.pending} | {folder}
            self.renamed = folder
        elif what in ("os.remove", "os.rmdir"):
            self.pending.discard(path)


class FileEvents:
    """Counts operations that change anything below `root`, and kills this process at the chosen one.

    A write counts twice: death before it, and death when half of it is done; several writes to a file without anything
    in between count as one. Operations that change nothing do not count. Death at event n + 1 is death after event n.
    """

    def __init__(self, root: Path, die_at: int) -> None:
        self.root, self.die_at = str(root.resolve()), die_at
        self.events: list[str] = []
        self._last = ""  # the path of the last event
        self.durability = Durability(self.root)

    def install(self) -> None:
        sys.addaudithook(self._audit)
        opened = io.open

        def open_counted(file: Any, mode: str = "r", buffering: int = -1, *args: Any, **kwargs: Any) -> Any:
            if isinstance(file, int) or not set(mode) & set("wax+") or not self._below(os.fspath(file)):
                return opened(file, mode, buffering, *args, **kwargs)
            raw = CountedFile(self, os.fspath(file), mode.replace("b", "").replace("t", ""))
            if buffering == 0:
                return raw
            binary = (io.BufferedRandom if "+" in mode else io.BufferedWriter)(raw)  # type: ignore[type-var]
            return binary if "b" in mode else io.TextIOWrapper(binary, *args, **kwargs)

        io.open = builtins.open = open_counted  # type: ignore[assignment]
        self.durability.install()
        self._wrap_native_writers()

    def happens(self, what: str, path: str, target: str = "") -> bool:
        """Whether to die at this event. `target`: the new name in a rename."""
        self.durability.changes(what, path, target)
        name = re.sub(r"tmp-\d+", "tmp", os.path.relpath(path, self.root))
        self.events.append(f"{what} {name}")
        self._last = path
        return len(self.events) == self.die_at

    def continues(self, path: str) -> bool:
        """Whether the last event was a write to the same file."""
        return bool(self.events) and self.events[-1].startswith("half of") and self._last == path

    def _below(self, path: str) -> bool:
        return os.path.abspath(path).startswith(self.root + os.sep)

    def _audit(self, name: str, args: tuple[Any, ...]) -> None:
        if name == "open":
            path, _, flags = args
            if not isinstance(path, (str, bytes)) or not flags & WRITING or not self._below(os.fsdecode(path)):
                return
            path = os.fsdecode(path)
            if os.path.exists(path) and not (flags & os.O_TRUNC and os.path.getsize(path)):
                return  # nothing changes
        elif name in CHANGING:
            # Deleting a tree names files relative to an open folder.
            path = os.fsdecode(args[0]) if isinstance(args[0], (str, bytes, os.PathLike)) else str(args[0])
            if name in ("os.remove", "os.rmdir") and args[1] != -1:
                path = os.path.join(os.readlink(f"/proc/self/fd/{args[1]}"), path)
            if not self._below(path) or os.path.exists(path) == (name == "os.mkdir"):
                return  # elsewhere, or nothing changes
        else:
            return
        if self.happens(name, path, os.fsdecode(args[1]) if name == "os.rename" else ""):
            die()

    def _wrap_native_writers(self) -> None:
        """safetensors and tokenizers write their files outside of Python."""
        import safetensors.torch

        from assay.text import Tokenizer

        serialize_file, save_tokenizer = safetensors.torch.serialize_file, Tokenizer.save

        def save_tensors(tensors: Any, filename: Any, **kwargs: Any) -> None:
            self._write_natively(Path(filename), lambda: serialize_file(tensors, filename, **kwargs))

        def save(tokenizer: Tokenizer, folder: str | Path) -> None:
            self._write_natively(Path(folder) / "tokenizer.json", lambda: save_tokenizer(tokenizer, folder))

        safetensors.torch.serialize_file = save_tensors
        Tokenizer.save = save  # type: ignore[method-assign]

    def _write_natively(self, path: Path, write: Callable[[], None]) -> None:
        if not self._below(str(path)):
            write()
            return
        if self.happens("write", str(path)):
            die()
        torn = self.happens("half of", str(path))
        write()
        if torn:
            os.truncate(path, path.stat().st_size // 2)
            die()


class CountedFile(io.FileIO):
    def __init__(self, events: FileEvents, path: str, mode: str) -> None:
        super().__init__(path, mode)
        self._events = events

    def write(self, data: Any) -> int:  # type: ignore[override]
        path = str(self.name)
        if self._events.continues(path):
            self._events.durability.pending.add(os.path.abspath(path))
            return super().write(data)
        if self._events.happens("write", path):
            die()
        if self._events.happens("half of", path):
            super().write(bytes(data)[: len(data) // 2])
            die()
        return super().write(data)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def live(request: Request, outgoing: int) -> None:
    """In the child: run to the end, or until the chosen event."""
    from assay.cli.main import main
    from assay.runs import environment
    from assay.runs.files import atomic_write
    from assay.training import run

    def draw_curves(run_path: Path) -> None:
        with atomic_write(run_path / "curves.png") as file:
            file.write(b"curves")

    log = os.open(Path(request.cwd) / "log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.chdir(request.cwd)
    run.draw_curves = draw_curves  # type: ignore[assignment]  # plotting takes longer than the run
    environment._git_state = lambda: None
    # Times and memory are constant, so that all bytes can be equal.
    time.perf_counter = lambda: 0.0  # type: ignore[assignment]
    run.memory_metrics = lambda device: {}
    events = FileEvents(Path(request.cwd) / "runs", request.die_at)
    events.install()
    code = main(request.words)
    sys.stdout.flush()
    with os.fdopen(outgoing, "w") as file:
        json.dump({"events": events.events, "volatile": events.durability.found}, file)
    os._exit(code)


def serve() -> None:
    import torch
    import transformers

    from assay.engine.native.compiled import library_for

    for name in ("torch._dynamo", "assay.cli.train", "assay.training.loop", "assay.build.run"):
        import_module(name)
    assert transformers.PreTrainedTokenizerFast and transformers.AutoTokenizer  # imported on first use
    library_for(torch.device("cpu"), torch.float32)  # compiled once
    torch.set_num_threads(1)
    for line in sys.stdin:
        request = Request(**json.loads(line))
        incoming, outgoing = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(incoming)
            try:
                live(request, outgoing)
            except BaseException:
                import traceback

                traceback.print_exc()
            os._exit(99)
        os.close(outgoing)
        with os.fdopen(incoming) as file:
            report = file.read()
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        said = (Path(request.cwd) / "log").read_text(errors="replace") if code else ""
        print(json.dumps(asdict(Result(code, said=said, **json.loads(report or "{}")))), flush=True)


if __name__ == "__main__":
    serve()
