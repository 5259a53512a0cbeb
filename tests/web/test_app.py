"""The server of the page: who may ask for what; the runs that are shown, and the learning story of a question."""

from __future__ import annotations

import asyncio
import socket
import threading
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
import web_parts
from permissions import public_folder, without_permission
from starlette.testclient import TestClient
from waiting import until
from web_parts import answer, group_of, listed, make_run, prompt_of, standard_run

from assay.runs import Run, write_rollouts
from assay.system import http_server
from assay.types import Group, Status
from assay.web.app import HEADERS, Indexer, Library, StoryQuery, default_times, make_app, story
from assay.web.data import RunView, ViewError

TOKEN = "the-token-of-this-test"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("app")
    with Run.create(folder / "runs", "one", web_parts.CONFIG) as run:
        run.log(1, {"reward/mean": float("inf"), "time/wall": 1.0})
        run.log(2, {"reward/mean": 0.5, "time/wall": 2.0})
    (folder / "secret.txt").write_text("SECRET")
    return folder / "runs"


def client_of(runs: Path, token: str | None = TOKEN, base: str = "http://localhost:6360", **options: Any) -> TestClient:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    return TestClient(make_app(Library([runs]), TOKEN, **options), base_url=base, headers=headers)


@pytest.fixture(scope="module")
def client(runs: Path) -> TestClient:
    return client_of(runs)


def test_the_url_with_the_token_sets_a_cookie_that_is_enough(runs: Path) -> None:
    client = client_of(runs, token=None)
    refused = client.get("/")
    assert refused.status_code == 403 and "open the URL" in refused.text and len(refused.text.splitlines()) == 1
    response = client.get(f"/?token={TOKEN}", follow_redirects=False)
    assert (response.status_code, response.headers["location"]) == (303, "/")
    cookie = response.headers["set-cookie"].lower()
    assert "httponly" in cookie and "samesite=strict" in cookie
    assert client.get("/").status_code == 200
    assert client.get("/api/runs").json()["runs"][0]["id"] == "one"
    assert client_of(runs, token=None).get(f"/api/runs?token={TOKEN}").status_code == 403  # for the page only


def test_nothing_is_answered_without_the_token(runs: Path) -> None:
    client = client_of(runs, token=None)
    for path in ("/", "/static/index.html", "/api/runs", "/api/runs/one", "/anything"):
        assert client.get(path).status_code == 403, path
    for token in ("", "wrong", TOKEN[:-1], TOKEN + "x", "é", TOKEN.upper()):
        assert client.get("/", params={"token": token}, follow_redirects=False).status_code == 403, token
        for headers in ({"Authorization": f"Bearer {token}".encode()}, {"Cookie": f"token={token}".encode()}):
            assert client.get("/api/runs", headers=headers).status_code == 403, headers


def test_only_names_of_this_machine_are_accepted(client: TestClient) -> None:
    for host in ("localhost", "localhost:9999", "127.0.0.1:6360", "[::1]:6360", "127.0.0.2", "LOCALHOST"):
        assert client.get("/api/runs", headers={"Host": host}).status_code == 200, host
    evil = ("evil.example", "localhost.evil.example", "10.0.0.3:6360", "0.0.0.0", "", "localhost@evil", "[::1", "127.1")
    for host in evil:
        assert client.get("/api/runs", headers={"Host": host}).status_code == 403, host


def test_a_server_for_other_machines_accepts_addresses_and_its_own_names(runs: Path) -> None:
    client = client_of(runs, hosts=frozenset({"*", "big-machine"}))
    answers = [
        client.get("/api/runs", headers={"Host": host}).status_code
        for host in ("10.0.0.3:6360", "big-machine:6360", "evil.example")
    ]
    assert answers == [200, 200, 403]


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://localhost:8000"},  # another server on this machine
        {"Origin": "http://[::1"},  # not a URL
        {"Origin": "http://localhost:6360/"},
        {"Origin": "http://user@localhost:6360"},
        {"Origin": "https://localhost:6360"},  # this page is not encrypted
        {"Origin": "HTTP://localhost:6360"},
        {"Origin": ""},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
    ],
)
def test_requests_of_other_sites_are_refused(client: TestClient, headers: dict[str, str]) -> None:
    own = {"Origin": "http://localhost:6360", "Sec-Fetch-Site": "same-origin"}
    assert client.get("/api/runs", headers=own).status_code == 200
    assert client.get("/api/runs", headers=own | headers).status_code == 403
    assert client.get(f"/?token={TOKEN}", headers=headers, follow_redirects=False).status_code == 403


def test_only_get_and_head(client: TestClient) -> None:
    for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"):
        assert client.request(method, "/api/runs").status_code == 405, method
    assert client.head("/api/runs").status_code == 200 and client.head("/api/runs").content == b""


@pytest.mark.parametrize("path", ["/", "/api/runs", "/api/runs/none", "/nothing", "/static/none.js"])
def test_every_response_has_the_security_headers(client: TestClient, runs: Path, path: str) -> None:
    for response in (client.get(path), client_of(runs, token=None).get(path)):
        assert {name: response.headers.get(name) for name in HEADERS} == HEADERS
        assert "access-control-allow-origin" not in response.headers
    assert "unsafe" not in HEADERS["Content-Security-Policy"]
    assert client.get("/static/index.html").headers["content-type"] == "text/html; charset=utf-8"


@pytest.mark.parametrize(
    "path",
    [
        *("/static/", "/static", "/static/../app.py", "/static/..%2fapp.py", "/static/%2e%2e/app.py"),
        f"/static/{5_000 * 'a'}.js",
        *("/static//etc/passwd", "/static/%2fetc%2fpasswd", "/static/index.html%00", "/static/.", "/etc/passwd"),
        *("/api/runs/..%2f..%2fsecret.txt", "/api/runs/%2e%2e", "/api/runs/one%2f..%2f..", "/api/runs/one%00"),
        *("/api/runs/%2fetc", "/api/runs/one/secret.txt", "/api/runs/one/config.toml", "/api/runs/", "/api"),
    ],
)
def test_there_is_nothing_else(client: TestClient, path: str) -> None:
    response = client.get(path)
    assert response.status_code == 404
    assert "SECRET" not in response.text and "root:" not in response.text


def test_values_that_are_not_finite_have_no_point(client: TestClient) -> None:
    assert client.get("/api/runs/one/metrics").json()["series"]["reward/mean"] == {"x": [2], "y": [0.5]}  # not inf


# Rollouts over HTTP

BEFORE, AFTER = "step-000000-before-test", "step-000003-after-test"


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> TestClient:
    """A run with rollouts, all of which are indexed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        client = client_of(web_parts.standard_run(tmp_path_factory.mktemp("full")))
        while client.get("/api/runs/one").json()["indexed"] != {"done": 5, "total": 5}:
            pass
        while client.get("/api/runs/one/rollouts").json()["total"] != 12:
            pass
    return client


def test_lists_over_http(full: TestClient) -> None:
    query = "search=SECOND&status=ok,wrong&from=2&to=2&sort=reward&order=desc&limit=1&min_reward=0&max_length=99"
    answer = full.get(f"/api/runs/one/rollouts?{query}").json()
    assert (answer["total"], answer["rows"][0]["preview"], len(answer["rows"])) == (2, "Second Try 0", 1)
    assert full.get("/api/runs/one/rollouts?step=2&changed=gained&truncated=0&prompt=p1").json()["total"] == 1
    assert full.get(f"/api/runs/one/rollouts?source={AFTER}").json()["total"] == 2
    rows = full.get("/api/runs/one/prompts?sort=pass_rate&order=desc&search=p").json()["rows"]
    assert [row["prompt_id"] for row in rows] == ["p2", "p1"]
    assert full.get("/api/runs/one/prompts?source=eval").json()["total"] == 2


def test_single_rollouts_and_groups_over_http(full: TestClient) -> None:
    assert full.get("/api/runs/one/rollouts/train/2/1").json()["text"] == "Second Try 1"
    assert full.get(f"/api/runs/one/rollouts/{AFTER}/3/0").json()["changed"] == "lost"
    found = full.get("/api/runs/one/neighbors/train/2/0?status=ok&sort=reward&order=desc").json()
    assert (found["position"], found["total"], found["next"]["step"]) == (3, 7, 3)
    assert full.get(f"/api/runs/one/neighbors/{AFTER}/3/0").json()["total"] == 2  # by default the list of its source
    assert len(full.get("/api/runs/one/groups/1/1").json()["rollouts"]) == 3
    assert full.get(f"/api/runs/one/groups/3/1?source={AFTER}").json()["prompt"]["id"] == "q1"


def test_comparisons_over_http(full: TestClient) -> None:
    one = full.get(f"/api/runs/one/compare?a={BEFORE}&b={AFTER}").json()
    two = full.get(f"/api/compare?run_a=one&a={BEFORE}&run_b=one&b={AFTER}&show=changed").json()
    assert one == two and one["counts"] == {"gained": 1, "lost": 1, "same_correct": 0, "same_wrong": 0}


BAD = [
    *("points=x", "points=-3", "points=1e9", "x=other", "since=now", "names=" + "a" * 3000),
    *("sort=other", "order=up", "limit=501", "offset=-1", "step=x", "min_reward=nan", "max_length=x", "truncated=x"),
    *("changed=1", "search=%00", "prompts?sort=step", "prompts?source=other", "compare?a=x", "compare?a=x&b=y&show=z"),
]


@pytest.mark.parametrize("path", BAD)
def test_bad_parameters(client: TestClient, path: str) -> None:
    """Of metrics, of rollouts, or as they are."""
    kind = "" if "?" in path else "metrics?" if path in BAD[:6] else "rollouts?"
    response = client.get(f"/api/runs/one/{kind}{path}")
    assert response.status_code == 400 and response.json()["error"]


@pytest.mark.parametrize(
    "path",
    [
        *("rollouts?source=nope", "rollouts/train/1/99", "rollouts/train/99/0", "rollouts/train/x/0", "groups/1/9"),
        *("rollouts/train/-1/0", "rollouts/..%2f..%2fetc/1/0", "rollouts/%2e%2e/1/0", "rollouts/%00/1/0"),
        *("rollouts/..%5c..%5cetc/1/0", "groups/1/0?source=..%2f..%2fsecret", "compare?a=..%2f..%2fx&b=nope"),
        *("rollouts/train/1/0/", "nothing", "rollouts/train", f"groups/{5_000 * '9'}/0"),
    ],
)
def test_things_that_do_not_exist(full: TestClient, path: str) -> None:
    response = full.get(f"/api/runs/one/{path}")
    assert response.status_code == 404 and response.json()["error"]


def test_hostile_rollouts_are_plain_json(tmp_path: Path) -> None:
    path = web_parts.make_run(tmp_path / "runs")
    prompt = web_parts.prompt_of("<b>", web_parts.HOSTILE[0])
    texts = web_parts.HOSTILE
    write_rollouts(path, 1, [Group(prompt, [web_parts.answer(prompt, n, text) for n, text in enumerate(texts)])])
    client = client_of(path.rename(path.with_name("50% <b> ä?#&")))
    (run,) = client.get("/api/runs").json()["runs"]
    assert run["id"] == "50% <b> ä?#&"
    for number, text in enumerate(texts):
        response = client.get(f"/api/runs/{quote(run['id'], safe='')}/rollouts/train/1/{number}")
        assert response.headers["content-type"] == "application/json" and response.json()["text"] == text
        assert response.content.isascii()


def test_connections_without_a_request_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "HEADER_TIMEOUT_S", 0.2)
    with http_server.bind("127.0.0.1", 0, listen=True) as listener:
        server = http_server.make_http_server(make_app(Library([]), TOKEN), lambda: None)
        thread = threading.Thread(target=lambda: asyncio.run(server.serve([listener])))
        thread.start()
        try:
            with socket.create_connection(listener.getsockname(), timeout=30) as connection:
                connection.sendall(b"GET / HTTP/1.1\r\nHost: local")
                assert connection.recv(100) == b""
        finally:
            server.stop()
            thread.join()


# The runs that are shown, and the thread that indexes them


def test_runs_of_several_folders_have_different_ids(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        make_run(tmp_path / folder, "demo", 2)
    library = Library([tmp_path / "a", tmp_path / "b" / "demo", tmp_path / "b"])
    assert [(run["id"], run["name"]) for run in library.runs()["runs"]] == [("demo", "demo"), ("demo~2", "demo")]
    assert library.view("demo~2").folder.path == tmp_path / "b" / "demo"
    new = make_run(tmp_path / "a", "new", 1)  # appears without a restart, and does not change other ids
    assert [view.id for view in library.views()] == ["demo", "new", "demo~2"]
    (new / "config.toml").unlink()
    (new / "metrics.jsonl").unlink()
    (new / "environment.json").unlink()
    with pytest.raises(ViewError, match="deleted"):
        library.view("new")
    assert [view.id for view in library.views()] == ["demo", "demo~2"]
    with pytest.raises(ViewError, match="no run 'other'"):
        library.view("other")


def test_links_out_of_a_runs_folder_are_refused(tmp_path: Path) -> None:
    outside = make_run(tmp_path / "elsewhere", "outside")
    make_run(tmp_path / "runs", "inside")
    (tmp_path / "runs" / "link").symlink_to(outside)
    library = Library([tmp_path / "runs"])
    shown = library.runs()
    assert [run["id"] for run in shown["runs"]] == ["inside"]
    assert str(outside) in shown["problems"][0]
    # A folder that the user gives may be a link.
    assert [view.id for view in Library([tmp_path / "runs" / "link"]).views()] == ["outside"]


def test_runs_without_permission_are_named() -> None:
    with public_folder() as folder:
        denied, _ = make_run(folder, "denied"), make_run(folder, "shown")
        library = Library([folder])
        assert library.runs()["problems"] == []
        with without_permission(denied):
            answer = library.runs()
            assert [run["id"] for run in answer["runs"]] == ["shown"]
            (problem,) = answer["problems"]
            assert problem.startswith(f"{denied} cannot be read (permission denied): run chmod -R u+rX {denied} if")
        assert library.runs()["problems"] == []
        view = library.view("denied")
        with without_permission(denied), pytest.raises(ViewError, match="permission denied"):
            library.view(view.id)


def eventually(view: RunView, total: int) -> None:
    until(lambda: listed(view)["total"] == total)


def test_runs_are_indexed_in_a_thread_while_they_grow(tmp_path: Path) -> None:
    path = standard_run(tmp_path / "runs")
    (view,) = Library([tmp_path / "runs"]).views()
    eventually(view, 12)
    write_rollouts(path, 4, [group_of("p9", ["ok"])])
    eventually(view, 13)


def test_a_run_that_cannot_be_indexed_does_not_stop_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    indexer = Indexer()
    broken = RunView("broken", standard_run(tmp_path / "a"), indexer.request)
    intact = RunView("intact", standard_run(tmp_path / "b"), indexer.request)

    def fail(seconds: float = 0.5) -> bool:
        raise MemoryError("no memory")

    monkeypatch.setattr(broken, "update_index", fail)
    assert listed(broken)["total"] == 0
    eventually(intact, 12)
    assert any("MemoryError" in problem for problem in broken.detail()["problems"])


# The learning story of a question: at which times it was answered, and which answers are shown


OK, WRONG = Status.OK, Status.WRONG


def run_of(folder: Path, *steps: list[Status]) -> RunView:
    """A run in which one question is answered in each step."""
    path, prompt = make_run(folder, steps=len(steps)), prompt_of("p")
    for step, statuses in enumerate(steps, start=1):
        rollouts = [answer(prompt, n, f"step {step} answer {n}", status) for n, status in enumerate(statuses)]
        write_rollouts(path, step, [Group(prompt, rollouts)])
    return RunView("one", path)


def test_the_story_has_the_majority_and_the_first_correct_answer(tmp_path: Path) -> None:
    view = run_of(tmp_path, [WRONG, WRONG, WRONG], [WRONG, WRONG, OK], [OK, WRONG, WRONG], [WRONG, OK, OK])
    found = story(view, StoryQuery(prompt="p"))
    assert [(time["step"], time["correct"], time["count"]) for time in found["times"]] == [
        *((1, 0, 3), (2, 1, 3), (3, 1, 3), (4, 2, 3))
    ]
    assert [one["text"] for one in found["answers"]] == [
        *("step 1 answer 0", "step 2 answer 2", "step 3 answer 1", "step 4 answer 1")
    ]
    assert found["first_correct"] == 1 and [one["is_first_correct"] for one in found["answers"]] == [0, 1, 0, 0]
    assert found["prompt"]["messages"][-1]["content"] == "what is p?"


def test_chosen_times_are_shown_in_the_order_of_the_run(tmp_path: Path) -> None:
    view = run_of(tmp_path, [WRONG], [WRONG], [OK])
    found = story(view, StoryQuery.model_validate({"prompt": "p", "at": "3,1,99"}))
    assert [one["step"] for one in found["answers"]] == [1, 3] and len(found["times"]) == 3


def test_evaluations_are_times_of_the_story(tmp_path: Path) -> None:
    view = RunView("one", standard_run(tmp_path))
    times = [(time["at"], time["label"], time["correct"]) for time in story(view, StoryQuery(prompt="q1"))["times"]]
    assert times == [("step-000000-before-test", "before", 0), ("step-000003-after-test", "after", 1)]
    empty = story(view, StoryQuery(prompt="unknown"))
    assert empty["times"] == empty["answers"] == [] and empty["first_correct"] is None


@pytest.mark.parametrize("first", [None, 0, 7, 99])
def test_the_first_the_last_and_the_first_correct_time_are_shown_by_default(first: int | None) -> None:
    keys = [str(number) for number in range(100)]
    chosen = default_times(keys, first)
    assert {"0", "99"} <= chosen and (first is None or str(first) in chosen) and 6 <= len(chosen) <= 7
