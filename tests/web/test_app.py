"""The server of the page: who may ask for what."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from assay.runs import Run
from assay.web.app import HEADERS, host_name, make_app
from assay.web.data import Library

CONFIG = 'seed = 3\n[task]\nname = "abacus"\n[model]\nsource = "preset:nano"\n[train]\nsteps = 9\n'
TOKEN = "the-token-of-this-test"


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    with Run.create(tmp_path / "runs", "one", CONFIG) as run:
        run.log(1, {"reward/mean": float("inf"), "time/wall": 1.0})
        run.log(2, {"reward/mean": 0.5, "time/wall": 2.0})
    (tmp_path / "secret.txt").write_text("SECRET")
    return tmp_path / "runs"


def client_of(runs: Path, token: str | None = TOKEN, base: str = "http://localhost:6360", **options: Any) -> TestClient:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    return TestClient(make_app(Library([runs]), TOKEN, **options), base_url=base, headers=headers)


@pytest.fixture
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


@pytest.mark.parametrize("token", [None, "", "wrong", TOKEN[:-1], TOKEN + "x", "é", TOKEN.upper()])
@pytest.mark.parametrize("path", ["/", "/static/index.html", "/api/runs", "/api/runs/one", "/anything"])
def test_nothing_is_answered_without_the_token(runs: Path, token: str | None, path: str) -> None:
    client = client_of(runs, token=None)
    assert client.get(path).status_code == 403
    if token is not None:
        assert client.get(path, params={"token": token}, follow_redirects=False).status_code == 403
        assert client.get(path, headers={"Authorization": f"Bearer {token}".encode()}).status_code == 403
        assert client.get(path, headers={"Cookie": f"token={token}".encode()}).status_code == 403


def test_the_token_in_the_url_is_for_the_page_only(runs: Path) -> None:
    assert client_of(runs, token=None).get(f"/api/runs?token={TOKEN}").status_code == 403


@pytest.mark.parametrize(
    "host", ["localhost", "localhost:9999", "127.0.0.1:6360", "[::1]:6360", "127.0.0.2", "LOCALHOST"]
)
def test_names_of_this_machine_are_accepted(client: TestClient, host: str) -> None:
    assert client.get("/api/runs", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize(
    "host",
    ["evil.example", "localhost.evil.example", "10.0.0.3:6360", "0.0.0.0", "", "localhost@evil", "[::1", "127.1"],
)
def test_other_host_names_are_refused(client: TestClient, host: str) -> None:
    assert client.get("/api/runs", headers={"Host": host}).status_code == 403


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
        {"Origin": "ftp://localhost:6360"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
    ],
)
def test_requests_of_other_sites_are_refused(client: TestClient, headers: dict[str, str]) -> None:
    assert client.get("/api/runs", headers=headers).status_code == 403
    assert client.get(f"/?token={TOKEN}", headers=headers, follow_redirects=False).status_code == 403


def test_requests_of_the_page_are_accepted(client: TestClient) -> None:
    headers = {"Origin": "http://localhost:6360", "Sec-Fetch-Site": "same-origin"}
    assert client.get("/api/runs", headers=headers).status_code == 200
    assert "access-control-allow-origin" not in client.get("/api/runs", headers=headers).headers


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"])
def test_only_get_and_head(client: TestClient, method: str) -> None:
    assert client.request(method, "/api/runs").status_code == 405
    assert client.head("/api/runs").status_code == 200 and client.head("/api/runs").content == b""


@pytest.mark.parametrize("path", ["/", "/api/runs", "/api/runs/none", "/nothing", "/static/none.js"])
def test_every_response_has_the_security_headers(client: TestClient, runs: Path, path: str) -> None:
    for response in (client.get(path), client_of(runs, token=None).get(path)):
        assert {name: response.headers.get(name) for name in HEADERS} == HEADERS
    assert "unsafe" not in HEADERS["Content-Security-Policy"]


@pytest.mark.parametrize(
    "path",
    [
        *("/static/", "/static", "/static/../app.py", "/static/..%2fapp.py", "/static/%2e%2e/app.py"),
        *("/static//etc/passwd", "/static/%2fetc%2fpasswd", "/static/index.html%00", "/static/.", "/etc/passwd"),
        *("/api/runs/..%2f..%2fsecret.txt", "/api/runs/%2e%2e", "/api/runs/one%2f..%2f..", "/api/runs/one%00"),
        *("/api/runs/%2fetc", "/api/runs/one/secret.txt", "/api/runs/one/config.toml", "/api/runs/", "/api"),
    ],
)
def test_there_is_nothing_else(client: TestClient, path: str) -> None:
    response = client.get(path)
    assert response.status_code == 404
    assert "SECRET" not in response.text and "root:" not in response.text


def test_static_files_have_their_types(client: TestClient) -> None:
    response = client.get("/static/index.html")
    assert response.status_code == 200 and response.headers["content-type"] == "text/html; charset=utf-8"


def test_numbers_that_are_not_finite_do_not_break_the_answer(client: TestClient) -> None:
    assert client.get("/api/runs/one/metrics").json()["series"]["reward/mean"] == {"x": [2], "y": [0.5]}


@pytest.mark.parametrize(
    "query", ["points=x", "points=-3", "points=1e9", "x=other", "since=now", "names=" + "a" * 3000]
)
def test_bad_parameters(client: TestClient, query: str) -> None:
    response = client.get(f"/api/runs/one/metrics?{query}")
    assert response.status_code == 400 and response.json()["error"]


def test_host_names() -> None:
    assert [host_name(text) for text in ("A.b:1", "[::1]:80", "a:b", "a/b", "")] == ["a.b", "::1", None, None, None]
