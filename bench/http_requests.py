"""Measure the CPU time of requests to a server, by the number of connection pools of the HTTP client.

    python bench/http_requests.py --json bench/results/http-requests-cpu.json

256 requests run at a time; another process answers each of them at once. See
`assay.system.openai_client.SpreadTransport`.
"""

from __future__ import annotations

import argparse
import asyncio
import shlex
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

from assay.bench.results import describe_machine, describe_versions, write
from assay.system import openai_client

CONCURRENT, REQUESTS, REPEATS = 256, 2048, 3
POOLS = (1, 16, 32, 64)
SERVER = r"""
import asyncio

async def answer(reader, writer):
    try:
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            size = head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0]
            await reader.readexactly(int(size))
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}")
            await writer.drain()
    except (asyncio.IncompleteReadError, ConnectionError):
        writer.close()

async def main():
    server = await asyncio.start_server(answer, "127.0.0.1", 0, backlog=2048)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()

asyncio.run(main())
"""


async def send_all(url: str) -> tuple[float, float]:
    """CPU and wall time of all requests, in seconds."""
    slots = asyncio.Semaphore(CONCURRENT)
    async with openai_client.new_client(url, "") as client:

        async def send(number: int) -> None:
            async with slots, openai_client.opened(client, "POST", "/generate", {"prompt": [number] * 64}) as response:
                assert await response.aread() == b"{}"

        cpu, wall = time.process_time(), time.perf_counter()
        await asyncio.gather(*map(send, range(REQUESTS)))
        return time.process_time() - cpu, time.perf_counter() - wall


def measure(url: str, pools: int) -> dict[str, Any]:
    openai_client.POOLS = pools
    runs = [asyncio.run(send_all(url)) for _ in range(REPEATS)]
    cpu, wall = (median(values) for values in zip(*runs, strict=True))
    return {"pools": pools, "cpu_ms_per_request": round(1000 * cpu / REQUESTS, 3), "wall_s": round(wall, 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the results to this file")
    args = parser.parse_args()
    server = subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        url = f"http://127.0.0.1:{int(server.stdout.readline())}"
        rows = []
        for pools in POOLS:
            rows.append(measure(url, pools))
            print(rows[-1])
    finally:
        server.kill()
    if args.json:
        versions = describe_versions() | {"httpx": version("httpx"), "httpcore": version("httpcore")}
        facts = {"command": shlex.join(["python", *sys.argv]), "concurrent": CONCURRENT, "requests": REQUESTS}
        write(args.json, facts | {"machine": describe_machine(), "versions": versions, "rows": rows})


if __name__ == "__main__":
    main()
