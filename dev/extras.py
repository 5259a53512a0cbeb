"""Test every extra with the newest versions of its packages, each in a virtual environment that is deleted afterwards.

    python dev/extras.py [EXTRA...]

`make test-extras` calls it. The environments share all other packages, such as torch and pytest, with the interpreter
that runs this script. The script fails if the tests of an extra fail, or if all of them are skipped.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import sysconfig
import tempfile
import tomllib
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SMOKE_TESTS = {  # words of the pytest command, by extra
    "hub": "tests/tasks/test_tasks_sources.py -k datasets_package",
    "parquet": "tests/tasks/test_parquet.py",
    "docs": "tests/test_docs_site.py -k builds",
    "gguf": "tests/models/test_gguf.py -k with_accelerate",
    "gymnasium": "tests/envs/test_envs_registry.py",
    "verifiers": "tests/integrations/test_verifiers.py tests/integrations/test_verifiers_policy.py",
    "reasoning-gym": "tests/tasks/test_datasets.py -m 'not slow'",
    "serve": "tests/server/test_app.py tests/system/test_http_server.py -m 'not slow'",
    "view": "tests/web/test_app.py -m 'not slow'",
    "vllm": "tests/integrations/test_vllm.py -m 'not slow'",
    "sglang": "tests/integrations/test_sglang.py -m 'not slow'",
    "ray": "tests/integrations/test_ray_judges.py",
    "openai": "tests/integrations/test_openai.py -m 'not slow'",
    "wandb": "tests/runs/test_trackers.py -k wandb",
    "trackio": "tests/runs/test_trackers.py -k trackio",
    "mlflow": "tests/runs/test_trackers.py -k mlflow",
    "tensorboard": "tests/runs/test_trackers.py -k tensorboard",
}
VERSIONS = "import sys, importlib.metadata as m; print(', '.join(f'{n} {m.version(n)}' for n in sys.argv[1:]))"


def requirements() -> dict[str, list[str]]:
    """The packages of each extra, without version limits."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    return {extra: [re.split(r"[<>=;\[ ]", text)[0] for text in texts] for extra, texts in extras.items()}


def check(extra: str, packages: list[str], folder: Path) -> tuple[str, str, str]:
    """A row of the table: the extra, the versions of its packages, and the result of its tests."""
    venv.create(folder)
    python, shared = folder / "bin" / "python", sysconfig.get_paths()["purelib"]
    (Path(run(python, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])")) / "shared.pth").write_text(
        shared
    )
    install = ["-m", "pip", "--python", str(python), "install", "-q", "--disable-pip-version-check", "-U", *packages]
    try:
        run(sys.executable, *install)
    except subprocess.CalledProcessError as error:
        return extra, "-", f"FAILED: cannot be installed: {(error.stderr or '').strip().splitlines()[-1]}"
    words = shlex.split(SMOKE_TESTS[extra])
    done = subprocess.run(
        [python, "-m", "pytest", "-p", "no:cacheprovider", *words],
        cwd=ROOT,
        env=environment(),
        text=True,
        capture_output=True,
    )
    counts = ", ".join(re.findall(r"\d+ (?:passed|failed|skipped|errors?)", done.stdout.splitlines()[-1]))
    ok = done.returncode == 0 and "passed" in counts
    if not ok:
        print(done.stdout, done.stderr, sep="\n", file=sys.stderr)
    return extra, run(python, "-c", VERSIONS, *packages), counts if ok else f"FAILED: {counts or 'no tests'}"


def run(*words: str | Path) -> str:
    return subprocess.run(words, check=True, capture_output=True, text=True, env=environment()).stdout.strip()


def environment() -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": str(ROOT / "src"),
        "OMP_NUM_THREADS": "1",
        "PYTEST_ADDOPTS": "-o addopts='-v -rs --import-mode=importlib'",
    }


def main() -> int:
    wanted = sys.argv[1:] or list(SMOKE_TESTS)
    rows = []
    for extra in wanted:
        print(f"{extra} ...", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory(prefix="assay-extra-") as folder:
            rows.append(check(extra, requirements()[extra], Path(folder)))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    for row in rows:
        print("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())
    return int(any("FAILED" in result for _, _, result in rows))


if __name__ == "__main__":
    sys.exit(main())
