"""`assay info`: facts about the installation, whatever state it is in."""

from __future__ import annotations

import json
import sys
from email.message import Message
from importlib import metadata

import pytest
import torch

from assay.cli.main import main
from assay.runs import environment


def facts(capsys: pytest.CaptureFixture[str]) -> dict:
    assert main(["info", "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_versions_threads_and_memory_are_those_of_this_process(capsys: pytest.CaptureFixture[str]) -> None:
    found = facts(capsys)
    assert found["versions"]["torch"] == metadata.version("torch")
    assert found["versions"]["python"] == sys.version.split()[0]
    assert found["torch"]["threads"] == torch.get_num_threads()
    assert 0 < found["machine"]["free_gib"] <= found["machine"]["memory_gib"]
    assert len(found["torch"]["gpus"]) == (torch.cuda.device_count() if torch.cuda.is_available() else 0)


REQUIRES = [
    "torch>=2.11",
    "numpy>=1.0 ; extra == 'numbers'",
    "no-such-package ; extra == 'numbers'",
    "numpy>=999 ; extra == 'future'",
    "numpy>=1.0 ; extra == 'ready'",
    "winpackage ; sys_platform == 'win32' and extra == 'ready'",
]


def test_extras_come_from_the_metadata_of_the_package(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    message = Message()
    for name in ("numbers", "future", "ready"):
        message["Provides-Extra"] = name
    monkeypatch.setattr(environment.metadata, "metadata", lambda name: message)
    monkeypatch.setattr(environment.metadata, "requires", lambda name: REQUIRES)
    monkeypatch.setattr(environment, "_is_editable", lambda: False)
    extras = facts(capsys)["extras"]
    assert {name: extra["installed"] for name, extra in extras.items()} == {
        "numbers": False,
        "future": False,
        "ready": True,
    }
    assert extras["numbers"]["packages"] == {"numpy": metadata.version("numpy"), "no-such-package": None}
    assert extras["future"]["outdated"] == ["numpy>=999"]
    assert extras["numbers"]["install"] == "pip install 'assay-rl[numbers]'"
    assert main(["info"]) == 0
    output = capsys.readouterr().out
    assert "no-such-package is missing" in output and "numpy>=999 is needed" in output


def test_a_broken_installation_is_described(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: object) -> object:
        raise metadata.PackageNotFoundError("assay-rl")

    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setattr(environment.metadata, "metadata", broken)
    monkeypatch.setattr("assay.cli.info.free_main_memory", broken)
    found = facts(capsys)
    assert "torch" in found["torch"]["error"] and found["extras"] == {} and found["machine"]["cores"]
    assert main(["info"]) == 0 and "not installed" in capsys.readouterr().out
