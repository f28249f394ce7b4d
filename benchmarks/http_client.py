"""The clients of `scripts/bench serve-http`, in a process of their own: one JSON line each way.

They speak HTTP/1.1 over plain asyncio sockets, one connection a request, and look at an answer only
once it has ended, so that they take little of the machine from the server.
"""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

MARK = b"data: "
PERCENTILES = (50, 95, 99)


@dataclass(slots=True)
class Reply:
    """An answer as it came."""

    status: int = 0
    first_s: float | None = None  # from the request to the first event
    gaps_s: list[float] = field(default_factory=list)  # between events, in turn
    body: bytes = b""
    left: bool = False  # by the client, before its end

    @property
    def tokens(self) -> list[int]:
        """The token ids, of whichever route."""
        if MARK not in self.body:
            return list(json.loads(self.body)["tokens"])
        found: list[int] = []
        for line in self.body.split(b"\n"):
            if not line.startswith(MARK) or line == b"data: [DONE]":
                continue
            event = json.loads(line[len(MARK) :])
            if "error" in event:
                raise ValueError(f"the stream ended with {event['error']}")
            choices = event.get("choices")
            if choices is None:
                found += event["tokens"]
            else:
                found += [token for choice in choices for token in choice.get("token_ids") or ()]
        return found


async def ask(
    port: int, path: str, body: bytes, *, leave_after_s: float = 0.0, pause_s: float = 0.0
) -> Reply:
    """One request; gone after `leave_after_s` (0: stays); a slow reader has a `pause_s`."""
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    limit = 1 << 12 if pause_s else 1 << 16
    start = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=limit)
    try:
        writer.write(head.encode() + body)
        timeout = leave_after_s or None
        async with asyncio.timeout(timeout):
            return await _read(reader, start, pause_s)
    except TimeoutError:
        return Reply(left=True)
    except (OSError, EOFError) as error:  # status 0
        return Reply(body=repr(error).encode())
    finally:
        writer.transport.abort()


async def _read(reader: asyncio.StreamReader, start: float, pause_s: float) -> Reply:
    reply, last = Reply(), start
    head = await reader.readuntil(b"\r\n\r\n")
    reply.status = int(head.split(b" ", 2)[1])
    parts: list[bytes] = []
    while True:
        if pause_s:
            await asyncio.sleep(pause_s)
        data = await reader.read(1 << 16)
        if not data:
            break
        n = data.count(MARK)
        now = time.perf_counter()
        if n and reply.first_s is None:
            reply.first_s = now - start
            n -= 1
        if n:
            reply.gaps_s += [(now - last) / n] * n
        if data.count(MARK):
            last = now
        parts.append(data)
    raw = b"".join(parts)
    reply.body = _unchunked(raw) if b"chunked" in head.lower() else raw
    return reply


def _unchunked(data: bytes) -> bytes:
    """The body of an answer in chunks."""
    out, at = [], 0
    while at < len(data):
        end = data.index(b"\r\n", at)
        size = int(data[at:end].split(b";")[0], 16)
        if size == 0:
            break
        out.append(data[end + 2 : end + 2 + size])
        at = end + 2 + size + 2
    return b"".join(out)


@dataclass(frozen=True, slots=True)
class Case:
    """A request whose greedy tokens are known, and where they are decided clearly."""

    path: str
    body: dict[str, Any]
    tokens: list[int]
    margins: list[float]  # gap of the two best logits at each token


@dataclass(slots=True)
class Phase:
    """What a phase of the load found."""

    n_complete: int = 0
    n_left: int = 0
    n_refused: int = 0  # 429 and 503
    n_tokens: int = 0
    n_early: int = 0  # answers that differ from an undecided token on
    widest: float = 0.0  # the largest margin at which one of these differs
    wrong: list[str] = field(default_factory=list)
    first_ms: dict[str, float] = field(default_factory=dict)
    token_ms: dict[str, float] = field(default_factory=dict)


class Load:
    """Clients that ask for random cases until a phase is over; some leave, some read slowly."""

    def __init__(self, port: int, cases: Sequence[Case], bound: float, seed: int) -> None:
        self._port = port
        self._cases = cases
        self._bound = bound
        self._random = random.Random(seed)

    async def phase(
        self, seconds: float, *, n_clients: int, n_slow: int, leave_share: float
    ) -> Phase:
        """`n_slow` of the clients read slowly; their times are not counted."""
        found, first, gaps = Phase(), [], []
        end = time.perf_counter() + seconds

        async def client(slow: bool) -> None:
            while time.perf_counter() < end:
                case = self._random.choice(self._cases)
                leaves = self._random.random() < leave_share
                reply = await ask(
                    self._port,
                    case.path,
                    json.dumps(case.body).encode(),
                    leave_after_s=self._random.uniform(0.01, 1.0) if leaves else 0.0,
                    pause_s=0.1 if slow else 0.0,
                )
                self._note(found, case, reply)
                if not slow and not reply.left:
                    gaps.extend(reply.gaps_s)
                    if reply.first_s is not None:
                        first.append(reply.first_s)

        await asyncio.gather(*(client(i < n_slow) for i in range(n_clients)))
        found.first_ms, found.token_ms = percentiles(first), percentiles(gaps)
        return found

    def _note(self, found: Phase, case: Case, reply: Reply) -> None:
        if reply.left:
            found.n_left += 1
        elif reply.status in (429, 503):
            found.n_refused += 1
        elif reply.status != 200:
            found.wrong.append(f"{case.path}: {reply.status} {reply.body[:200]!r}")
        else:
            found.n_complete += 1
            try:
                tokens = reply.tokens
            except (ValueError, KeyError, IndexError) as error:
                found.wrong.append(f"{case.path}: {error!r:.200}")
                return
            found.n_tokens += len(tokens)
            at = first_difference(tokens, case.tokens)
            if at is None:
                return
            if at < len(case.margins) and case.margins[at] < 2 * self._bound:
                found.n_early += 1
                found.widest = max(found.widest, case.margins[at])
            else:
                found.wrong.append(f"{case.body} differs at token {at}: {tokens}, {case.tokens}")


def first_difference(got: Sequence[int], expected: Sequence[int]) -> int | None:
    """The first place where they differ, their lengths too; None: nowhere."""
    for i, (one, other) in enumerate(zip(got, expected, strict=False)):
        if one != other:
            return i
    return None if len(got) == len(expected) else min(len(got), len(expected))


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """Milliseconds by p50, p95, p99; nothing where there is nothing."""
    if not values:
        return {}
    ordered = sorted(values)
    n = len(ordered)
    return {f"p{p}": 1e3 * ordered[min(n - 1, n * p // 100)] for p in PERCENTILES}


async def burst(port: int, path: str, bodies: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """All requests at once: seconds to the last end, events, and CPU seconds of this process."""
    encoded = [json.dumps(body).encode() for body in bodies]
    start, cpu = time.perf_counter(), time.process_time()
    replies = await asyncio.gather(*(ask(port, path, body) for body in encoded))
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    bad = [reply.body[:200] for reply in replies if reply.status != 200]
    if bad:
        raise RuntimeError(f"the server answered {bad[0]!r}")
    return {
        "seconds": seconds,
        "cpu_s": cpu,
        "n_tokens": sum(len(reply.tokens) for reply in replies),
        "token_ms": percentiles([gap for reply in replies for gap in reply.gaps_s]),
    }


class ClientProcess:
    """The clients' process."""

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.http_client"],
            cwd=Path(__file__).resolve().parent.parent,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        return self

    def __exit__(self, *_exc: object) -> None:
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.close()
        process.wait()
        process.stdout.close()

    def ask(self, message: dict[str, Any]) -> dict[str, Any]:
        """Has them do something, and waits for what it gives."""
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(message) + "\n")
        process.stdin.flush()
        line = process.stdout.readline()
        if not line:
            raise RuntimeError(f"the clients' process ended with {process.wait()}")
        return dict(json.loads(line))


def main() -> None:
    """Answers messages until its input ends."""
    load: Load | None = None
    for line in sys.stdin:
        message = json.loads(line)
        kind = message.pop("do")
        answer: dict[str, Any] = {}
        if kind == "burst":
            answer = asyncio.run(burst(**message))
        elif kind == "cases":
            cases = [Case(**case) for case in message["cases"]]
            load = Load(message["port"], cases, message["bound"], message["seed"])
        else:
            assert load is not None, "first the cases"
            phase = asyncio.run(load.phase(**message))
            answer = {name: getattr(phase, name) for name in Phase.__slots__}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
