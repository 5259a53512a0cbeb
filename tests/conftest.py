"""Shared set-up: where real data and models are looked for, and settings that keep tests quick and repeatable."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings

from assay.types import UserError

# Test machines are shared and slow at times: a deadline would fail what is right.
settings.register_profile("assay", deadline=None, derandomize=True)
settings.load_profile("assay")

# A shell's background jobs ignore Ctrl-C, and so would everything they start: tests that send it would wait forever.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Without a GPU Triton's kernels run in its interpreter, which has to be said before anything imports triton.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "helpers"))  # makes the modules there importable
sys.path.append(str(ROOT / "bench"))  # and the scripts of benchmarks
sys.path.append(str(ROOT))  # and the tests themselves, in processes that they start


@pytest.hookimpl(trylast=True)  # after the tests that -m leaves out are gone
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
    # Files with slow tests first, then those with many tests: otherwise one process works long after the others.
    weights: Counter[tuple[Path, bool]] = Counter(
        (item.path, item.get_closest_marker("slow") is None) for item in items
    )
    items.sort(key=lambda item: (-weights[item.path, False], -weights[item.path, True], item.path))


def pytest_collection_finish() -> None:
    """Leave modules and tests, which stay until the end, out of garbage collections: with them, each takes 0.5 s."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Random models are the same whatever tests ran before.

    After a product in bfloat16 on a CPU that cannot do it, torch gives up oneDNN for the rest of the process: sums
    of later tests would differ, in the last bits, from those of the processes they start.
    """
    torch.manual_seed(0)
    torch.backends.mkldnn.set_flags(True)


@pytest.fixture(scope="session", autouse=True)
def state_directory(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Which code is trusted is remembered in the user's state directory: here one that belongs to the tests."""
    os.environ["XDG_STATE_HOME"] = str(tmp_path_factory.mktemp("state"))


@pytest.fixture(scope="session")
def gsm8k_folder() -> Path:
    """The GSM8K files, where they are present."""
    folder = Path(os.environ.get("ASSAY_GSM8K", ROOT.parent / "shared" / "data" / "gsm8k"))
    if not (folder / "train.jsonl").exists():
        pytest.skip("GSM8K is not here: set ASSAY_GSM8K to a folder with train.jsonl and test.jsonl")
    return folder


@pytest.fixture
def stdout_of(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """`stdout_of(main(words))`: what a command prints to standard output. It must return 0, or `code`."""

    def printed(returned: int, code: int = 0) -> str:
        shown = capsys.readouterr()
        assert returned == code, shown.err
        return shown.out

    return printed


@pytest.fixture
def stderr_of(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """`stderr_of(main(words))`: what a command prints to standard error. It must return 2, or `code`."""

    def printed(returned: int, code: int = 2) -> str:
        shown = capsys.readouterr().err
        assert returned == code, shown
        return shown

    return printed


@pytest.fixture
def refused(stderr_of: Callable[..., str]) -> Callable[[int], str]:
    """`refused(main(words))`: the one line with which a command refuses to do something."""

    def line_of(returned: int) -> str:
        (line,) = stderr_of(returned).splitlines()
        return line

    return line_of


@pytest.fixture(scope="session")
def confined() -> None:
    """Skips tests of programs where the system does not confine them."""
    from assay.system.code_runner import start_runner

    try:
        start_runner().close()
    except UserError as error:
        pytest.skip(str(error))


@pytest.fixture
def one_thread() -> Iterator[None]:
    """The order of sums depends on the number of threads: runs that must be equal to the last bit use one."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def no_curves() -> Iterator[None]:
    """From now on no curves.png: plotting takes longer than a small run. tests/cli/test_train.py checks the picture."""
    from assay.training import run

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "draw_curves", lambda path: None)
        yield


@pytest.fixture
def small(tmp_path: Path, no_curves: None, one_thread: None) -> Any:
    """A folder for runs of a nano model."""
    from small_run import SmallRuns

    return SmallRuns(tmp_path)
