"""The HTTP side of `assay view`: access control, the runs that are shown, JSON routes, static files of the page.

Everything needs the token, which the page keeps in a cookie. The host name of a request must be one of this machine: a
foreign name that resolves to this machine (DNS rebinding) is refused. So are requests that another site causes.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import json
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, TypeVar

import numpy as np
from pydantic import BaseModel, Field, ValidationError
from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from assay.runs.directory import access_problem, unreadable_folders
from assay.system.http_server import is_loopback, is_same_origin
from assay.types import describe_error
from assay.web.data import MetricsQuery, RunView, ViewError, compare, plain, shortened
from assay.web.folder import is_run_folder
from assay.web.index import SKIPPED, TRAIN, activity
from assay.web.table import OK, CompareQuery, Names, PromptsQuery, RolloutsQuery, RolloutTable, Text

STATIC = Path(__file__).parent / "static"
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".png": "image/png",
}
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
NO_TOKEN = "This page needs the token: open the URL that `assay view` has printed."
FOREIGN = "This request comes from another site: paste the URL that `assay view` has printed into the address bar."


class Guard:
    """Refuses requests without the token, of other sites, or with a host name that is not this machine's."""

    def __init__(self, app: ASGIApp, token: str, hosts: frozenset[str] = frozenset()) -> None:
        """`hosts`: accepted host names besides names of the loopback interface; "*" for any IP address."""
        self.app, self.token, self.hosts = app, token, hosts
        # With its own name, another `assay view` on the same machine does not replace the cookie.
        self.cookie = "assay_" + hashlib.sha256(token.encode()).hexdigest()[:12]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers[name] = value
            await send(message)

        request = Request(scope)
        response = self.refusal(request) or self.login(request)
        await (response or self.app)(scope, receive, send_with_headers)

    def refusal(self, request: Request) -> Response | None:
        if request.method not in ("GET", "HEAD"):
            return refused(request, "Only GET and HEAD are supported.", 405, {"Allow": "GET, HEAD"})
        if not self.is_own_host(request.headers.get("host", "")):
            return refused(request, "This host name is not accepted: use localhost or 127.0.0.1.", 403)
        if not is_same_origin(request.headers, request.url.scheme):
            return refused(request, FOREIGN, 403)
        if not self.is_authorized(request):
            return refused(request, NO_TOKEN, 403)
        return None

    def login(self, request: Request) -> Response | None:
        """For the URL with the token: keep it in a cookie, and remove it from the address bar."""
        if request.url.path != "/" or "token" not in request.query_params:
            return None
        response = RedirectResponse("/", 303)
        response.set_cookie(self.cookie, self.token, httponly=True, samesite="strict", path="/")
        return response

    def is_own_host(self, header: str) -> bool:
        name = host_name(header) or ""
        if is_loopback(name) or name in self.hosts:
            return True
        with suppress(ValueError):
            return "*" in self.hosts and bool(ipaddress.ip_address(name))
        return False

    def is_authorized(self, request: Request) -> bool:
        """The token as a cookie, as a bearer token, or, for the page itself, in the URL."""
        scheme, _, bearer = request.headers.get("authorization", "").partition(" ")
        given = [request.cookies.get(self.cookie, ""), bearer.strip() if scheme.lower() == "bearer" else ""]
        given += [request.query_params.get("token", "")] if request.url.path == "/" else []
        # All are compared, so that the time does not depend on which one is right.
        matches = [hmac.compare_digest(value.encode(errors="replace"), self.token.encode()) for value in given]
        return any(matches)


def host_name(header: str) -> str | None:
    """The name in a Host header, without the port; None if it is malformed. With ssh, the port may be another one."""
    match = re.fullmatch(r"(?:\[([0-9a-fA-F:.]+)\]|([A-Za-z0-9._-]+))(?::\d{1,5})?", header)
    return (match[1] or match[2]).lower() if match else None


def refused(request: Request, message: str, status: int, headers: Mapping[str, str] | None = None) -> Response:
    if request.url.path.startswith("/api/"):
        return answer({"error": message}, status)
    return Response(message + "\n", status, headers, "text/plain")


def answer(content: Any, status: int = 200) -> Response:
    try:
        text = json.dumps(content, allow_nan=False)
    except (TypeError, ValueError):  # only then convert it: that is slow for long lists
        text = json.dumps(plain(content), allow_nan=False)
    return Response(text, status, media_type="application/json")


Parameters = TypeVar("Parameters", bound=BaseModel)


def parsed(model: type[Parameters], request: Request, **defaults: str) -> Parameters:
    """The parameters of a request. Mistakes raise ViewError with status 400."""
    given = defaults | {name: value for name, value in request.query_params.items() if value}
    try:
        return model.model_validate(given)
    except ValidationError as error:
        first = error.errors()[0]
        raise ViewError(f"{first['loc'][0]}: {first['msg']}", 400) from None


def list_query(request: Request, source: str) -> RolloutsQuery:
    """`source`: the default."""
    step = request.query_params.get("step")
    return parsed(RolloutsQuery, request, source=source, **({"from": step, "to": step} if step else {}))


def path_integers(request: Request, *names: str) -> tuple[int, ...]:
    values = [request.path_params[name] for name in names]
    if not all(re.fullmatch(r"-?[0-9]{1,15}", value) for value in values):
        raise ViewError(f"{' and '.join(names)} must be integers")
    return tuple(map(int, values))


# The runs that are shown, and the thread that indexes their rollouts

ACTIVE_S = 30.0  # after a request, new rollouts of a run are looked for this long
PAUSE_S = 1.0  # between two looks at the files of a run


class Indexer:
    """Indexes the rollouts of runs that are being looked at, in a thread."""

    def __init__(self) -> None:
        self._wake = threading.Event()
        self._requested: dict[RunView, float] = {}
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def request(self, view: RunView) -> None:
        """Keep the index of this run current for a while."""
        with self._lock:
            is_new = view not in self._requested
            self._requested[view] = time.monotonic()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="assay-view-index", daemon=True)
                self._thread.start()
        if is_new:
            self._wake.set()

    def _run(self) -> None:
        while True:
            more = False
            for view in self._active():
                try:
                    more = view.update_index() or more
                except Exception as error:  # the others are still indexed
                    view.index.problem = f"the rollouts cannot be indexed ({describe_error(error)})"
            if not more:
                self._wake.wait(PAUSE_S)
                self._wake.clear()

    def _active(self) -> list[RunView]:
        with self._lock:
            now = time.monotonic()
            self._requested = {view: at for view, at in self._requested.items() if now - at < ACTIVE_S}
            return sorted(self._requested, key=lambda view: -self._requested[view])


class Library:
    """The runs that are shown: run folders, and the runs in runs folders, also those that are added later."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self.paths = [path.absolute() for path in paths]
        self._lock = threading.Lock()
        self._views: dict[Path, RunView] = {}  # by resolved path
        self._refused: dict[str, str] = {}
        self._unreadable: dict[Path, list[str]] = {}  # by given folder
        self._indexer = Indexer()

    def views(self) -> list[RunView]:
        """All runs, in the order of the given folders; in a folder the oldest first."""
        with self._lock:
            found = list(dict.fromkeys(path for root in self.paths for path in self._runs_of(root)))
            self._views = {path: view for path, view in self._views.items() if path in found}
            taken = {view.id for view in self._views.values()}
            for path in found:
                if path not in self._views:
                    identifier = unique(path.name, taken)
                    taken.add(identifier)
                    self._views[path] = RunView(identifier, path, self._indexer.request)
            return [self._views[path] for path in found]

    def _runs_of(self, root: Path) -> list[Path]:
        """Resolved paths. Links in a runs folder must not lead out of it; a given folder may be a link itself."""
        if is_run_folder(root):
            return [root.resolve()]
        inside = root.resolve()
        self._unreadable[root] = unreadable_folders(inside)
        with suppress(OSError):
            folders = [path.resolve() for path in inside.iterdir() if is_run_folder(path)]
            outside = [path for path in folders if not path.is_relative_to(inside)]
            self._refused |= {str(path): f"{path} is linked from {root}: give its path to see it" for path in outside}
            return sorted((path for path in folders if path.is_relative_to(inside)), key=_age)
        return []

    def view(self, identifier: str) -> RunView:
        """A run by its id."""
        known = {view.id: view for view in self._views.values()}
        if identifier not in known:
            known = {view.id: view for view in self.views()}
        if identifier not in known:
            raise ViewError(f"there is no run {identifier!r}")
        if problem := access_problem(known[identifier].folder.root):
            raise ViewError(problem)
        if not is_run_folder(known[identifier].folder.root):
            raise ViewError(f"the folder of run {identifier!r} was deleted")
        return known[identifier]

    def runs(self) -> dict[str, Any]:
        runs = [view.facts() for view in self.views()]
        return {"runs": runs, "problems": shortened(self.problems())}

    def problems(self) -> list[str]:
        """Folders that are not shown, as of the last look at them."""
        unreadable = [text for texts in self._unreadable.values() for text in texts]
        return [*unreadable, *self._refused.values()]


def unique(name: str, taken: set[str]) -> str:
    """The name, with a number if another run has it."""
    names = (name if number == 1 else f"{name}~{number}" for number in range(1, len(taken) + 2))
    return next(candidate for candidate in names if candidate not in taken)


def _age(path: Path) -> tuple[float, str]:
    with suppress(OSError):
        return (path / "config.toml").stat().st_mtime, path.name
    return 0.0, path.name


# Routes


def endpoints(library: Library) -> dict[str, Callable[[Request], Any]]:
    """The requests of the page, by path."""

    def view(request: Request) -> RunView:
        return library.view(request.path_params["run"])

    def neighbors(request: Request) -> Any:
        source = request.path_params["source"]
        step, index = path_integers(request, "step", "index")
        return view(request).neighbors((source, step, index), list_query(request, source))

    def rollout(request: Request) -> Any:
        return view(request).rollout(request.path_params["source"], *path_integers(request, "step", "index"))

    def group(request: Request) -> Any:
        source = request.query_params.get("source") or TRAIN
        return view(request).group(source, *path_integers(request, "step", "group"))

    def compared(request: Request) -> Any:
        run = request.path_params.get("run")
        query = parsed(CompareQuery, request, **({"run_a": run, "run_b": run} if run else {}))
        return compare(library.view(query.run_a), library.view(query.run_b), query)

    return {
        "/api/runs": lambda request: library.runs(),
        "/api/compare": compared,
        "/api/runs/{run}": lambda request: view(request).detail(),
        "/api/runs/{run}/metrics": lambda request: view(request).metrics(parsed(MetricsQuery, request)),
        "/api/runs/{run}/prompts": lambda request: view(request).current_table().prompts(parsed(PromptsQuery, request)),
        "/api/runs/{run}/rollouts": lambda request: view(request).rollouts(list_query(request, TRAIN)),
        "/api/runs/{run}/rollouts/{source}/{step}/{index}": rollout,
        "/api/runs/{run}/neighbors/{source}/{step}/{index}": neighbors,
        "/api/runs/{run}/groups/{step}/{group}": group,
        "/api/runs/{run}/story": lambda request: story(view(request), parsed(StoryQuery, request)),
        "/api/runs/{run}/compare": compared,
    }


def make_app(library: Library, token: str, hosts: frozenset[str] = frozenset()) -> ASGIApp:
    app = Starlette(
        routes=[
            Route("/", lambda request: static_file("index.html"), methods=["GET"]),
            Route("/static/{name}", lambda request: static_file(request.path_params["name"]), methods=["GET"]),
            *(Route(path, answering(made), methods=["GET"]) for path, made in endpoints(library).items()),
            Route("/{rest:path}", lambda request: refused(request, "There is no such page.", 404), methods=["GET"]),
        ]
    )
    return Guard(app, token, hosts)


def answering(endpoint: Callable[[Request], Any]) -> Callable[[Request], Response]:
    """The endpoint with JSON answers, also for errors."""

    def respond(request: Request) -> Response:
        try:
            with activity:
                return answer(endpoint(request))
        except ViewError as error:
            return answer({"error": str(error)}, error.status)
        except OSError as error:  # a file that was deleted in the meantime
            return answer({"error": describe_error(error)}, 404)
        except Exception as error:
            traceback.print_exc(file=sys.stderr)
            return answer({"error": f"a bug in assay view: {describe_error(error)}"}, 500)

    return respond


def static_file(name: str) -> Response:
    """A file of the page."""
    path = next((path for path in STATIC.iterdir() if path.name == name and path.suffix in TYPES), None)
    if path is None:
        return Response("There is no such file.\n", 404, media_type="text/plain")
    return Response(path.read_bytes(), media_type=TYPES[path.suffix])


# The learning story of a question: its answers at some times of a run, in training and in evaluations

DEFAULT_TIMES = 6  # that are shown without a choice
MAX_TIMES = 24


class StoryQuery(BaseModel):
    """A prompt by its id, and the times whose answers are shown: steps of training, or names of evaluations."""

    prompt: Text
    at: Annotated[Names, Field(max_length=MAX_TIMES)] = ()


def story(view: RunView, query: StoryQuery) -> dict[str, Any]:
    """All times at which the question was answered, and one answer of each chosen time.

    It is an answer of the majority, correct or not; the correct one at the time of the first correct answer.
    """
    table = view.current_table()
    times = times_of(table, query.prompt)
    first = next((number for number, moment in enumerate(times) if moment["correct"]), None)
    keys = query.at or default_times([moment["at"] for moment in times], first)
    answers, lines = [], []
    for number, moment in enumerate(times):
        rows = moment.pop("rows")
        if moment["at"] not in keys:
            continue
        correct = number == first or 2 * moment["correct"] >= moment["count"]
        row = next(row for row in rows if (table.rows["status"][row] == OK) == correct)
        file, index = table.files[table.file[row]], int(table.rows["index"][row])
        (line,) = view.lines(file, [index])
        lines.append((file, index, line))
        answers.append({**moment, **view.answer(file, index, line), "is_first_correct": number == first})
    view.add_pieces(lines, answers)
    known = lines[0][2] if lines else {}
    asked = {name: known.get(name) for name in ("messages", "answer")}
    return {"prompt": {"id": query.prompt, **asked}, "times": times, "answers": answers, "first_correct": first}


def times_of(table: RolloutTable, prompt: str) -> list[dict[str, Any]]:
    """Times at which a prompt was answered, the earliest first: numbers of correct and of all answers, and its rows."""
    rows = np.flatnonzero(table.prompt == table.prompt_numbers.get(prompt, -1))
    found = []
    for number in np.unique(table.file[rows]).tolist():
        part = rows[table.file[rows] == number]
        place = table.files[number].place
        if place.source == SKIPPED:
            continue
        correct = int((table.rows["status"][part] == OK).sum())
        at = str(place.step) if place.source == TRAIN else place.source
        facts = {"at": at, "step": place.step, "source": place.source, "label": place.label or "training"}
        found.append(
            (place.step, place.order, {**facts, "correct": correct, "count": len(part), "rows": part.tolist()})
        )
    return [moment for _, _, moment in sorted(found, key=lambda entry: entry[:2])]


def default_times(keys: list[str], first_correct: int | None) -> set[str]:
    """The first and the last time, the first correct answer, and some between them."""
    if not keys:
        return set()
    chosen = set(np.linspace(0, len(keys) - 1, min(DEFAULT_TIMES, len(keys))).round().astype(int).tolist())
    return {keys[number] for number in chosen | ({first_correct} if first_correct is not None else set())}
