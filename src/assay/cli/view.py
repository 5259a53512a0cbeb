"""Show runs in the browser: curves, prompts, rollouts token by token, and what is wrong with them.

  assay view                       all runs in the folder runs
  assay view demo other/runs/big   two runs, by name or path
Only this machine can reach the page, and only with the token in the printed URL. Ctrl-C ends it.
"""

from __future__ import annotations

import argparse
import asyncio
import getpass
import ipaddress
import os
import secrets
import socket
import sys
import threading
import webbrowser
from collections.abc import Sequence
from pathlib import Path

from assay.cli.runs import add_runs_dir
from assay.system.http_server import bind, is_loopback, make_http_server, serve_until_stopped
from assay.types import UserError, missing_extra, plural
from assay.web.folder import find_folder

PORT = 6360
KEEP_ALIVE_S = 30  # after which an idle connection is closed


def add_arguments(parser: argparse.ArgumentParser) -> None:
    text = "folders with runs, run folders, or names of runs (default: the folder of the runs)"
    parser.add_argument("runs", nargs="*", metavar="RUNS", help=text)
    add_runs_dir(parser)
    text = f"port [{PORT}, or a free one if it is in use]; 0: any free port"
    parser.add_argument("--port", type=int, metavar="N", help=text)
    text = "address to listen on; others than loopback make the runs readable for everybody who has the URL [127.0.0.1]"
    parser.add_argument("--host", default="127.0.0.1", metavar="ADDRESS", help=text)
    text = "open the page in the browser [only with a display, and not over ssh]"
    parser.add_argument("--open", action=argparse.BooleanOptionalAction, default=None, help=text)


def run(args: argparse.Namespace) -> int:
    try:
        import uvicorn  # noqa: F401

        from assay.web.app import make_app
    except ImportError:
        raise missing_extra("assay view", "view") from None
    from assay.web.app import Library

    library = Library(folders(args.runs, args.dir))
    count = len(library.views())
    if not count:
        if problems := library.problems():
            raise UserError(problems[0])
        where = ", ".join(map(str, library.paths))
        raise UserError(f"there are no runs in {where} yet: `assay train CONFIG` creates one, or give another folder")
    listener = listen(args.host, args.port)
    try:
        token = secrets.token_urlsafe(24)
        url = page_url(listener, token)

        def announce() -> None:
            print(f"{plural(count, 'run')} at {url}\n{reach_hint(listener)}Ctrl-C ends it.", flush=True)
            if args.open or (args.open is None and has_display()):
                threading.Thread(target=webbrowser.open, args=(url,), daemon=True).start()

        sys.setswitchinterval(0.001)  # requests wait less for the thread that indexes rollouts
        threading.Thread(target=library.runs, daemon=True).start()  # reads all metrics, for the first page
        app = make_app(library, token, accepted_hosts(args.host))
        server = make_http_server(app, announce, timeout_keep_alive=KEEP_ALIVE_S, timeout_graceful_shutdown=1)
        asyncio.run(serve_until_stopped(server, listener, lambda: None))
    finally:
        listener.close()
    return 0


def folders(names: Sequence[str], runs_dir: Path) -> list[Path]:
    """The given folders and runs; `runs_dir` if there are none."""
    if not names and not runs_dir.is_dir():
        raise UserError(f"there is no folder {runs_dir}: give the folder of your runs, as in assay view PATH")
    return [find_folder(name, runs_dir, or_runs=True) for name in names] or [runs_dir]


def listen(host: str, port: int | None) -> socket.socket:
    """Listen on the given port; without one, on the default port or a free one."""
    if port is not None:
        return bind(host, port, listen=True)
    try:
        return bind(host, PORT, listen=True)
    except UserError:
        return bind(host, 0, listen=True)


def accepted_hosts(host: str) -> frozenset[str]:
    """Host names in requests: names of this machine if others may reach it; "*" stands for IP addresses."""
    if is_loopback(host):
        return frozenset()
    return frozenset({"*", host.lower(), socket.gethostname().lower(), socket.getfqdn().lower()})


def page_url(listener: socket.socket, token: str) -> str:
    host, port = listener.getsockname()[:2]
    if ipaddress.ip_address(host).is_unspecified:
        host = socket.gethostname()
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/?token={token}"


def reach_hint(listener: socket.socket) -> str:
    """How to reach the page if this machine is a remote one."""
    host, port = listener.getsockname()[:2]
    if not is_loopback(host):
        return "Everybody who has this URL can read the runs; the connection is not encrypted.\n"
    user, machine = getpass.getuser(), socket.gethostname()
    command = f"ssh -L {port}:localhost:{port} {user}@{machine}"
    return f"From another machine: {command}, then open the same URL there.\n"


def has_display() -> bool:
    if os.environ.get("SSH_CONNECTION"):
        return False
    return bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")) or os.uname().sysname == "Darwin"
