"""HTTP requests to servers: answers, streams of lines, and errors that say what to do."""

from __future__ import annotations

import gzip
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from http_parts import Answer, SmallServer, small_server
from stub_endpoint import raw_server

from assay.engine.remote import http
from assay.types import UserError


class SomeHttpServers(http.HttpServers):
    kind, section, start_advice = "test", "server", "start it"


@contextmanager
def connected(answer: Callable[[str, Any], Answer], **options: Any) -> Iterator[tuple[SomeHttpServers, SmallServer]]:
    with small_server(answer) as server:
        servers = SomeHttpServers({f"{server.url}/v1": ""}, **options)
        try:
            yield servers, server
        finally:
            servers._disconnect()


def error_of(status: int, body: Any, kind: type[http.ServerError] = http.ServerError) -> str:
    with connected(lambda path, _: (status, body)) as (servers, _), pytest.raises(kind) as raised:
        servers.call(servers.servers[0], "GET", "/path")
    assert type(raised.value) is kind and "\n" not in str(raised.value)
    return str(raised.value)


def test_answers_are_json_or_nothing() -> None:
    with connected(lambda path, body: (200, {"got": body} if path == "/echo" else b"")) as (servers, server):
        assert servers.call(servers.servers[0], "POST", "/echo", {"a": 1}) == {"got": {"a": 1}}
        assert servers.call_all("POST", "/nothing") == [None] and server.paths() == ["/echo", "/nothing"]


def test_refusals_are_reported_with_the_message_of_the_server() -> None:
    assert error_of(400, {"error": {"message": "bad\nfield"}}).endswith("/path answered 400: bad field")
    assert error_of(422, {"detail": "no"}).endswith("answered 422: no")
    assert error_of(500, b"<html>down</html>", http.ServerFailed).endswith("answered 500: <html>down</html>")
    assert "refused access (401): set server.api_key_env" in error_of(401, {})
    assert "is overloaded: full" in error_of(429, {"error": "full"}, http.ServerBusy)
    assert len(error_of(400, {"message": "x" * 5000})) < 400


def test_garbage_is_reported_with_its_beginning() -> None:
    text = error_of(200, b"<html> hello " + b"x" * 500, http.ServerGarbage)
    assert "returned something that is not JSON ('<html> hello xxx" in text and "another program" in text


def test_a_silent_server_is_reported_after_the_time_limit() -> None:
    def silent(path: str, body: Any) -> Answer:
        time.sleep(1)
        return 200, {}

    with connected(silent, timeout_s=0.1) as (servers, _):
        with pytest.raises(http.ServerError, match=r"/path did not answer within 0.1 s: .* raise server.timeout_s"):
            servers.call(servers.servers[0], "GET", "/path")
        assert servers.call(servers.servers[0], "GET", "/path", timeout_s=30) == {}


def test_a_server_that_is_not_reachable_is_reported_with_advice() -> None:
    with connected(lambda path, body: (200, {})) as (servers, server):
        server.drop = True
        with pytest.raises(http.ServerUnreachable, match=r"the test server http\S+ is not reachable .*: start it, or"):
            servers.call(servers.servers[0], "GET", "/path")


async def lines_of(servers: SomeHttpServers) -> list[Any]:
    return [line async for line in servers.post_for_lines(servers.servers[0], "/lines", {})]


def test_lines_of_an_answer_are_json() -> None:
    with connected(lambda path, body: (200, b'{"a": 1}\n[2]\n')) as (servers, _):
        assert servers.loop.call(lines_of(servers)) == [{"a": 1}, [2]]
    for answer, message in [((200, b"1\noops\n"), "not JSON ('oops')"), ((400, {"error": "bad"}), "answered 400: bad")]:
        with (
            connected(lambda path, body, answer=answer: answer) as (servers, _),
            pytest.raises(http.ServerError) as raised,
        ):  # type: ignore[misc]
            servers.loop.call(lines_of(servers))
        assert message in str(raised.value)


def raw_answer(*headers: str) -> bytes:
    return "\r\n".join(["HTTP/1.1 200 OK", *headers, "", ""]).encode()


CHUNK = b"10000\r\n" + b"x" * 0x10000 + b"\r\n"
HOSTILE = {
    "an endless body": (http.ServerGarbage, [raw_answer("transfer-encoding: chunked"), 0.0, CHUNK]),
    "a gzip bomb": (
        http.ServerGarbage,
        [raw_answer("content-encoding: gzip", "content-length: 1000000") + gzip.compress(b"0" * 1_000_000), 1.0, b""],
    ),
    "a drip of bytes": (http.ServerSilent, [raw_answer("content-length: 1000000"), 0.05, b" "]),
    "a drip of headers": (http.ServerSilent, [b"HTTP/1.1 200 OK\r\n", 0.05, b"a: b\r\n"]),
    "a drip of blank lines": (http.ServerError, [raw_answer("content-length: 1000000"), 0.05, b"\n"]),
}


@pytest.mark.parametrize("kind", HOSTILE)
@pytest.mark.parametrize("in_lines", [False, True], ids=["whole answer", "lines"])
def test_answers_are_limited_in_size_and_time(kind: str, in_lines: bool) -> None:
    error, (begin, pause_s, rest) = HOSTILE[kind]
    with raw_server(begin, pause_s, rest) as (url, sent):
        servers = SomeHttpServers({url: ""}, timeout_s=30 if error is http.ServerGarbage else 0.4)
        started = time.monotonic()
        with pytest.raises(error):
            servers.loop.call(lines_of(servers)) if in_lines else servers.call(servers.servers[0], "GET", "/path")
        assert time.monotonic() - started < 20
        servers._disconnect()
    assert sent[0] < 60 << 20  # the limit of such an answer is 16 MiB, and buffers of the sockets hold some more


def test_rounding_errors_of_log_probabilities_are_valid_and_positive_ones_are_not() -> None:
    servers = SomeHttpServers({})
    assert servers.valid_logprobs([-2, 1e-4, 0.0], 3) == [-2.0, 1e-4, 0.0]
    for bad in ([0.01], [float("-inf")], ["-1"], [False], [], None, "a"):
        with pytest.raises(http.ServerGarbage):
            servers.valid_logprobs(bad, 1)
    servers._disconnect()


def test_a_redirect_is_not_followed() -> None:
    with small_server(lambda path, body: (200, {})) as other:
        text = raw_answer(f"location: {other.url}", "content-length: 0").replace(b"200 OK", b"307 Moved")
        with raw_server(text, 0.0, b"") as (url, _):
            servers = SomeHttpServers({url: "secret"})
            with pytest.raises(http.ServerGarbage, match="redirect"):
                servers.call(servers.servers[0], "POST", "/path", {})
            servers._disconnect()
        assert not other.requests


def test_credentials_in_a_url_are_sent_and_never_shown() -> None:
    def refuse(path: str, body: Any) -> Answer:
        return (200, {}) if path.startswith("/ok") else (400, {"message": f"pa55word and {path} are wrong"})

    with small_server(refuse) as server:
        host = server.url.removeprefix("http://")
        servers = SomeHttpServers({f"http://user:pa55word@{host}/v1?api_key=s3cret": ""})
        assert servers.call(servers.servers[0], "GET", "/ok?level=1") == {}
        assert server.paths() == ["/ok?level=1&api_key=s3cret"]
        assert server.headers[0]["authorization"] == "Basic dXNlcjpwYTU1d29yZA=="
        with pytest.raises(http.ServerError, match=r"http://\*\*\*@127.* answered 400: ") as refused:
            servers.call(servers.servers[0], "GET", "/path")
        server.drop = True
        with pytest.raises(http.ServerUnreachable) as lost:
            servers.call(servers.servers[0], "GET", "/path")
        servers._disconnect()
    with pytest.raises(UserError, match="write it as http://HOST:PORT") as invalid:
        http.check_url("http://user:pa55word@host:port?api_key=s3cret")
    for error in (refused, lost, invalid):
        assert "pa55word" not in str(error.value) and "s3cret" not in str(error.value)


@pytest.mark.parametrize(
    ("given", "url"),
    [("http://a:1/v1/", "http://a:1"), (" https://b ", "https://b"), ("http://[::1]:80", "http://[::1]:80")],
)
def test_urls_are_normalized(given: str, url: str) -> None:
    assert http.check_url(given) == url


@pytest.mark.parametrize("given", ["", "a:1", "localhost:8000", "ftp://a", "http://", "http://a:port"])
def test_what_is_no_url_is_refused(given: str) -> None:
    with pytest.raises(UserError, match="is not the URL of a server: write it as http://HOST:PORT"):
        http.check_url(given)
