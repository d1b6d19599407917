"""Throughput of a slow reward over HTTP: one server against three of the same kind.

    python benchmarks/reward_replicas.py [--seconds 10] [--workers 4] [--in_flight 256]

Each server is a process of its own whose reward takes 50 ms a sample and which works on --workers samples at a time.
256 samples are in flight through the same client and retries as in a run; each answer is checked against its request.
Ends with status 1 when three servers together answer less than 2.7 times as many samples a second as one.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

REPLICAS = 3
LEAST_RATIO = 2.7
WARM_UP = 2.0


def serve(reward_seconds: float, workers: int) -> None:
    """A server on a free port, which it prints; a sample's reward is its label as a number."""
    from aiohttp import web

    slots = asyncio.Semaphore(workers)

    async def reward(label: str) -> float:
        async with slots:
            await asyncio.sleep(reward_seconds)
        return float(label)

    async def answer(request: web.Request) -> web.Response:
        labels = (await request.json())["labels"]
        return web.json_response({"rewards": await asyncio.gather(*map(reward, labels))})

    async def run() -> None:
        app = web.Application()
        app.router.add_post("/get_reward", answer)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        print(runner.addresses[0][1], flush=True)
        await asyncio.Event().wait()

    asyncio.run(run())


@contextmanager
def server(options: argparse.Namespace) -> Iterator[str]:
    """The URL of a server in a process of its own."""
    arguments = ["--serve", "--reward_seconds", str(options.reward_seconds), "--workers", str(options.workers)]
    process = subprocess.Popen([sys.executable, __file__, *arguments], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield f"http://127.0.0.1:{int(process.stdout.readline())}/get_reward"
    finally:
        process.kill()
        process.wait()


async def samples_per_second(urls: list[str], options: argparse.Namespace) -> float:
    """Answers a second in `--seconds`, after a warm-up, with so many samples in flight all the time."""
    from openrlhf.rollout.rewards import HTTPOptions, HTTPReward, RewardClient, RewardRequest

    client = RewardClient(HTTPReward(urls, HTTPOptions(batch_size=options.batch_size)))
    numbers, answered = itertools.count(), 0

    async def keep_asking() -> None:
        nonlocal answered
        for number in numbers:
            result: Any = await client.score(RewardRequest(f"question {number}, answer", "question", str(number)))
            if result.reward != number:
                raise SystemExit(f"sample {number} got the reward of sample {result.reward:g}")
            answered += 1

    tasks = [asyncio.ensure_future(keep_asking()) for _ in range(options.in_flight)]
    await asyncio.wait(tasks, timeout=WARM_UP, return_when=asyncio.FIRST_EXCEPTION)
    before, started = answered, time.perf_counter()
    await asyncio.wait(tasks, timeout=options.seconds, return_when=asyncio.FIRST_EXCEPTION)
    rate = (answered - before) / (time.perf_counter() - started)
    for task in tasks:
        if task.done():
            task.result()
        task.cancel()
    await client.close()
    return rate


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=10.0, help="how long each case is measured")
    parser.add_argument("--reward_seconds", type=float, default=0.05, help="what one sample takes")
    parser.add_argument("--workers", type=int, default=4, help="samples that one server works on at a time")
    parser.add_argument("--in_flight", type=int, default=256, help="samples waiting for their reward")
    parser.add_argument("--batch_size", type=int, default=16, help="samples in one request at most")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.reward_seconds, options.workers)
        return 0
    rates = {}
    for count in (1, REPLICAS):
        with ExitStack() as stack:
            urls = [stack.enter_context(server(options)) for _ in range(count)]
            rates[count] = asyncio.run(samples_per_second(urls, options))
        most = count * options.workers / options.reward_seconds
        print(
            f"{count} server{'s' * (count > 1)}: {rates[count]:7.1f} samples/s ({rates[count] / most:.1%} of {most:g})"
        )
    ratio = rates[REPLICAS] / rates[1]
    print(f"{REPLICAS} servers are {ratio:.2f} times as fast as one")
    return 0 if ratio >= LEAST_RATIO else 1


if __name__ == "__main__":
    sys.exit(main())
