"""Measures what limits members on many ranks, and saves it as CSV; rank_projection.py makes the page's table of it.

``python tests/benchmarks/rank_exchanges.py`` measures, on the loopback device, all-gathers of several sizes by 2 to 8
ranks; the same between network namespaces whose links have a known rate (needs root; left out where that is not
permitted); rings of threads whose links have a known delay; the objective for many members; and the two ways to write
a checkpoint. It takes about two minutes.
"""

from __future__ import annotations

import argparse
import os
import queue
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file

import ensemblekit as ek
from ensemblekit.bench.report import csv_text, machine, today
from ensemblekit.bench.workloads import all_workloads
from ensemblekit.core.memory import keep_freed_memory
from ensemblekit.engines.selection import engine_class
from ensemblekit.ranks.session import joined_ranks
from ensemblekit.testing.several_ranks import run_on_ranks

RESULTS = Path(__file__).parent / "results" / "ranks.csv"
COLUMNS = ("date", "machine", "kind", "ranks", "bytes", "seconds", "note")
SIZES = (256, 4096, 51_200, 409_600, 1_638_400)
"""Bytes that each rank has; 51,200 are the outputs of one member for 128 samples and 100 classes."""
RANKS = (2, 3, 4, 6, 8)
REPEATS = 40
NAMESPACE_RANKS = (2, 4, 8)
RATE_MBIT = 200
RING_DELAY = 0.005
RING_RANKS = (2, 4, 8, 16, 32, 64)
OBJECTIVE_MEMBERS = (16, 64, 256, 1000)
BATCH, CLASSES = 128, 100
CHECKPOINT_MEMBERS = 16
Row = dict[str, str]


def row(kind: str, ranks: int, size: int, seconds: float, note: str = "") -> Row:
    return {"kind": kind, "ranks": str(ranks), "bytes": str(size), "seconds": f"{seconds:.4g}", "note": note}


def quartile(work: Callable[[], object], repeats: int, before: Callable[[], object] = lambda: None) -> float:
    """Seconds that the work takes in the lower quartile: other programs make single repeats slower, never faster."""
    seconds = []
    for _ in range(repeats):
        before()
        started = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
    return statistics.quantiles(seconds, n=4, method="inclusive")[0]


def all_gathers(kind: str, sizes: tuple[int, ...], repeats: int) -> list[Row]:
    """Time all-gathers of this process and the others of its launch; a rank waits for the others before each."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rows, ranks = [], dist.get_world_size()
    for size in sizes:
        own, received = torch.zeros(size, dtype=torch.uint8), torch.empty(ranks * size, dtype=torch.uint8)

        def gather(received: torch.Tensor = received, own: torch.Tensor = own) -> None:
            dist.all_gather_into_tensor(received, own)

        rows.append(row(kind, ranks, size, quartile(gather, repeats, dist.barrier)))
    dist.destroy_process_group()
    return rows


def collected(folder: Path) -> list[Row]:
    """What the first rank has measured."""
    names = COLUMNS[2:]
    return [dict(zip(names, line.split(","), strict=True)) for line in (folder / "rows").read_text().splitlines()]


def report(folder: Path, rows: list[Row]) -> None:
    if os.environ["RANK"] == "0":
        (folder / "rows").write_text("".join(",".join(one.values()) + "\n" for one in rows))


def loopback(folder: Path) -> Iterator[Row]:
    for ranks in RANKS:
        run_on_ranks(lambda: report(folder, all_gathers("loopback", SIZES, REPEATS)), ranks)
        yield from collected(folder)


def shell(command: str) -> None:
    subprocess.run(command.split(), check=True, capture_output=True, text=True)


def namespaces(folder: Path) -> Iterator[Row]:
    """Real ranks with addresses of their own; `tc` limits what each can send."""
    for ranks in NAMESPACE_RANKS:
        try:
            shell("ip link add ek-bridge type bridge")
            shell("ip link set ek-bridge up")
            processes = [_start_in_namespace(rank, ranks, folder) for rank in range(ranks)]
            for process in processes:
                process.wait(timeout=120)
            yield from collected(folder)
        except (OSError, subprocess.CalledProcessError) as error:
            print(f"network namespaces are left out: {getattr(error, 'stderr', error)}", file=sys.stderr)
            return
        finally:
            for name in (*(f"netns del ek-rank-{rank}" for rank in range(ranks)), "link del ek-bridge"):
                subprocess.run(["ip", *name.split()], check=False, capture_output=True)


def _start_in_namespace(rank: int, ranks: int, folder: Path) -> subprocess.Popen[bytes]:
    space = f"ek-rank-{rank}"
    shell(f"ip netns add {space}")
    shell(f"ip link add ek-port-{rank} type veth peer name ek-link netns {space}")
    shell(f"ip link set ek-port-{rank} master ek-bridge up")
    inside = f"ip netns exec {space}"
    shell(f"{inside} ip address add 10.213.7.{rank + 1}/24 dev ek-link")
    shell(f"{inside} ip link set ek-link up")
    shell(f"{inside} ip link set lo up")
    shell(f"{inside} tc qdisc add dev ek-link root tbf rate {RATE_MBIT}mbit burst 64kb latency 1s")
    places = {"RANK": rank, "WORLD_SIZE": ranks, "MASTER_ADDR": "10.213.7.1", "MASTER_PORT": 29511}
    environment = {
        **os.environ,
        "GLOO_SOCKET_IFNAME": "ek-link",
        **{name: str(value) for name, value in places.items()},
    }
    command = [*inside.split(), sys.executable, __file__, "--in-namespace", str(folder)]
    return subprocess.Popen(command, env=environment)


def ring_of_threads(ranks: int, delay: float) -> float:
    """Seconds of a ring all-gather by threads: in each of n - 1 rounds, a block takes the delay to the next one."""
    inboxes: list[queue.SimpleQueue[int]] = [queue.SimpleQueue() for _ in range(ranks)]

    def work(rank: int) -> None:
        block = rank
        for _ in range(ranks - 1):
            time.sleep(delay)
            inboxes[(rank + 1) % ranks].put(block)
            block = inboxes[rank].get()

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(ranks)]
    started = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - started


def rings() -> Iterator[Row]:
    for ranks in RING_RANKS:
        seconds = min(ring_of_threads(ranks, RING_DELAY) for _ in range(3))
        yield row("threads", ranks, 0, seconds, f"delay {RING_DELAY} s")


def objectives() -> Iterator[Row]:
    """The objective and its gradient, which every rank computes for all members."""
    torch.set_num_threads(1)
    target = torch.randint(CLASSES, (BATCH,))
    for members in OBJECTIVE_MEMBERS:
        outputs = torch.randn(members, BATCH, CLASSES).requires_grad_()

        def work(outputs: torch.Tensor = outputs) -> None:
            value = ek.objective({"name": "gncl", "lambda": 0.5}, outputs, target, loss="cross_entropy")
            torch.autograd.grad(value, outputs)

        yield row("objective", members, outputs.numel() * 4, quartile(work, 15), "members in the column of ranks")


def member_steps() -> Iterator[Row]:
    """A step of one ResNet on one core, which is what a rank does between two exchanges if it has one member."""
    torch.set_num_threads(1)
    workload = all_workloads()["real-convolutions"].changed(ensemble={"members": 1})
    device = torch.device("cpu")
    keep_freed_memory()
    engine = engine_class("threaded")(workload.members(device), workload.objective(), workload.settings(device))
    batch, steps = workload.batch(device), count()
    seconds = quartile(lambda: engine.train_step(batch, None, workload.learning_rate, next(steps)), 9)
    engine.close()
    yield row("member step", 1, 0, seconds, "ResNet, width 32, batches of 128")


def checkpoints(folder: Path) -> Iterator[Row]:
    """16 ResNets with the state of their optimizer: gathered and written by one rank, or each rank writes its own."""
    workload = all_workloads()["real-convolutions"]
    for ranks in (2, 4):

        def work() -> None:
            torch.set_num_threads(1)
            with joined_ranks() as group:
                own = [member for member in workload.members(torch.device("cpu"), group) if member.is_here]
                tensors = {
                    f"{part}.{member.seed_index}.{name}": value.detach().clone()
                    for member in own
                    for part in ("members", "optimizer.mean", "optimizer.variance")
                    for name, value in member.network.state_dict().items()
                }
                size = sum(value.numel() * value.element_size() for value in tensors.values())

                def gathered() -> None:
                    everything = group.gather_tensors(tensors)
                    if group.is_first:
                        _write(everything, folder / "all.safetensors")
                    group.gather_json(None)

                def apart() -> None:
                    _write(tensors, folder / f"{group.rank}.safetensors")
                    group.gather_json(None)

                meet = lambda: group.gather_json(None)  # noqa: E731 - all ranks begin together
                ways = {"gathered to one rank": gathered, "each rank writes its own": apart}
                rows = [row("checkpoint", group.size, size, quartile(way, 9, meet), note) for note, way in ways.items()]
                report(folder, rows)

        run_on_ranks(work, ranks)
        yield from collected(folder)


def _write(tensors: dict[str, torch.Tensor], path: Path) -> None:
    save_file(tensors, path)
    with path.open("rb") as file:
        os.fsync(file.fileno())


def main() -> None:
    """Measure everything, and save it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--in-namespace", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.in_namespace:
        report(options.in_namespace, all_gathers("namespaces", SIZES, 5))
        return
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        # forked ranks first: a process must not be forked after torch has started threads
        parts = (loopback(folder), checkpoints(folder), namespaces(folder), rings(), objectives(), member_steps())
        for one in (one for part in parts for one in part):
            print(", ".join(value for value in one.values() if value), flush=True)
            rows.append({"date": today(), "machine": machine(), **one})
    options.output.write_text(csv_text(COLUMNS, rows), encoding="utf-8")


if __name__ == "__main__":
    main()
