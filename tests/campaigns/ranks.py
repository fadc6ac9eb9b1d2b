"""Makes ranks of a training fail in every way, by a seed, and lets it go on: every result must be bit-identical.

``python tests/campaigns/ranks.py --faults 40 --seed 0 --csv faults.csv``

Each trial trains a small spec on two to four ranks. One of them is killed, hangs, runs out of memory, finds the disk
full, or is cut off from the others (hosts of their own, if that is permitted), when it loads data, trains a step,
evaluates or saves. All ranks must end in time by themselves with exit code 7 and one line that names the rank, and the
last checkpoint must load. Then they are started again as torchrun does, or the run is resumed on another number of
ranks. Some trials leave all of that to torchrun itself. Steps that were trained twice are counted.
"""

from __future__ import annotations

import argparse
import csv
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass, fields
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parents[1]))
from helpers import faulty_ranks
from helpers.faulty_ranks import Fault, Launch, happenings, import_all, launch_store, run_ranks
from helpers.hosts import Hosts, reason_against_hosts

from campaigns.kills import content
from ensemblekit.runs.directory import RunDirectory

METHODS = {
    "gncl": '"gncl"',
    "bagging": '"bagging"',
    "boosting": '"boosting"',
    "snapshot": '{name = "snapshot", at_epochs = [2, 4]}',
    "adaboost": '"adaboost"',
    "end_to_end": '"end_to_end"',
}
EPOCHS, STEPS = 6, 19
SPEC = """\
seed = 3
method = {method}
data = {{ name = "digits", limit_train = 300, limit_test = 60, augment = ["crop"], padding = 1 }}
model = {{ name = "mlp", hidden = [24], dropout = 0.2 }}
ensemble.members = 3
training = {{ epochs = {epochs}, batch_size = 16, checkpoint_every_minutes = 0.001 }}
engine = {{ name = "sequential", device = "cpu", rank_timeout = {timeout} }}
"""
RANK_TIMEOUT = 6.0
SECONDS_TO_END = 15.0
KINDS = ("kill", "hang", "memory", "kill", "disk", "kill", "hang", "memory", "kill", "cut")
LAST = {"start": 1, "step": EPOCHS * STEPS, "evaluation": EPOCHS, "saving": EPOCHS + 1, "writing": 20}
"""How often a rank comes to each moment at least."""
EVERY_TORCHRUN = 10
"""One of so many trials is left to torchrun."""
DISK_BYTES = 2**21


@dataclass
class Row:
    """What came of a trial."""

    trial: int
    method: str
    ranks: int
    kind: str
    rank: int
    moment: str
    number: int
    seconds_to_end: float = 0.0
    recovery: str = ""
    steps_repeated: int = 0
    seconds: float = 0.0
    """Of all launches together."""
    line: str = ""
    wrong: str = ""


def fault_of(kind: str, source: random.Random, size: int) -> Fault:
    """Choose who fails, and when."""
    rank = source.randrange(size)
    moment = source.choice(["step", "step", "evaluation", "saving", "start", "writing"])
    if kind in ("disk", "cut"):
        moment = "step"
    if moment == "writing":
        rank = 0
    # a full disk is noticed at the next checkpoint, so there has to be one
    last = LAST[moment] - STEPS if kind == "disk" else LAST[moment]
    return Fault(kind, rank, moment, source.randint(1, last))


def launch_with(fault: Fault, size: int, folder: Path, stack: ExitStack) -> Launch:
    """Train on ranks of which one fails."""
    arguments = ["train", "spec.toml", "--out", "disk/run", "--quiet"]
    hosts = stack.enter_context(Hosts(size)) if fault.kind == "cut" else None

    def prepare(rank: int) -> None:
        if hosts is not None:
            hosts.enter(rank)
        if rank == fault.rank:
            fault.install(folder, happenings(folder / "disk")[fault.kind])

    def cut(processes: object) -> None:
        assert hosts is not None
        while not (folder / "fault").exists():
            time.sleep(0.01)
        hosts.cut.add(hosts.addresses[fault.rank])

    if hosts is None:
        return run_ranks(arguments, size, folder, prepare)
    return run_ranks(
        arguments,
        size,
        folder,
        prepare,
        address=hosts.addresses[0],
        make_store=lambda address: hosts.run_in(0, lambda: launch_store(address)),
        follow=cut,
    )


def judge(fault: Fault, launch: Launch) -> str:
    """Return what is wrong with the end of the ranks, or an empty text."""
    if launch.seconds_after_fault is None:
        return f"the fault did not happen: {launch.codes}"
    limit = SECONDS_TO_END + (RANK_TIMEOUT if fault.kind in ("hang", "cut") else 0)
    limit += 60 if fault.kind == "disk" else 0  # which is noticed at the next checkpoint
    if None in launch.codes or launch.seconds_after_fault > limit:
        return f"ended after {launch.seconds_after_fault:.0f} s: {launch.codes}"
    own = -9 if fault.kind in ("kill", "hang") else 7
    expected = [own if rank == fault.rank else 7 for rank in range(len(launch.codes))]
    if launch.codes != expected:
        return f"exit codes {launch.codes}: {launch.errors}"
    if len(launch.errors) != (len(launch.codes) if fault.kind == "cut" else 1):  # one on each host
        return f"{len(launch.errors)} errors: {launch.errors}"
    named = 0 if fault.kind == "disk" else fault.rank  # which writes
    is_named = all(f"rank {named}" in line for line in launch.errors)
    if not is_named and not (fault.kind == "cut" and fault.rank == 0):  # whose host has the store: others are cut off
        return f"rank {named} is not named: {launch.errors}"
    noise = [line for log in launch.logs for line in log.splitlines() if "Traceback" in line]
    return f"noise: {noise[0]}" if noise else ""


def recover(source: random.Random, size: int, kind: str, folder: Path) -> tuple[str, Launch]:
    """Let the run go on; returns how, and how that ended."""
    (folder / "disk" / "filler").unlink(missing_ok=True)
    train = ["train", "spec.toml", "--out", "disk/run", "--quiet"]
    if kind not in ("cut", "disk") and source.random() < 0.5:
        return f"restart on {size}", run_ranks(train, size, folder, restarts=1)
    other = source.randint(1, 4)
    if not (folder / "disk" / "run" / "run.json").exists():
        return f"train on {other}", run_ranks(train, other, folder)
    return f"resume on {other}", run_ranks(["resume", "disk/run", "--quiet"], other, folder)


def trial(row: Row, fault: Fault, source: random.Random, folder: Path, whole: object) -> None:
    """Let a fault happen and the run go on, and record what is wrong."""
    with ExitStack() as stack:
        launch = launch_with(fault, row.ranks, folder, stack)
    row.seconds_to_end, row.line = round(launch.seconds_after_fault or 0.0, 2), " | ".join(launch.errors)
    row.seconds = launch.seconds
    row.wrong = judge(fault, launch)
    path = folder / "disk" / "run"
    saved = 0
    if (path / "run.json").exists() and not RunDirectory.open(path).has_saved_nothing:
        checkpoint = RunDirectory.open(path).load_checkpoint()
        saved = checkpoint.epoch * STEPS + checkpoint.step
    row.steps_repeated = launch.steps - saved
    row.recovery, again = recover(source, row.ranks, fault.kind, folder)
    row.seconds += again.seconds
    if any(again.codes):
        row.wrong = row.wrong or f"{row.recovery}: {again.codes}: {again.errors}"
    elif content(path) != whole:
        row.wrong = row.wrong or "another result"


def trial_of_torchrun(row: Row, fault: Fault, folder: Path, whole: object) -> None:
    """Let torchrun start ranks again of which one has failed."""
    script = [faulty_ranks.__file__, fault.kind, str(fault.rank), fault.moment, str(fault.number), str(folder)]
    options = ["--nproc-per-node", str(row.ranks), "--max-restarts", "1"]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", *options, *script]
    command += ["train", "spec.toml", "--out", "disk/run", "--quiet"]
    search = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    started = time.monotonic()
    environment = {**os.environ, "PYTHONPATH": search}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=180)
    row.seconds, row.recovery = time.monotonic() - started, "torchrun --max-restarts 1"
    errors = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    row.line = " | ".join(errors)
    if done.returncode:
        row.wrong = f"torchrun ended with {done.returncode}: {errors}"
    elif len(errors) != 1 or f"rank {fault.rank}" not in errors[0]:
        row.wrong = f"errors: {errors}"
    elif content(folder / "disk" / "run") != whole:
        row.wrong = "another result"


def undisturbed(method: str, folder: Path) -> tuple[object, float]:
    """Train in one process to the end; returns what must not depend on faults, and the seconds of two ranks."""
    (folder / "disk").mkdir(parents=True)
    spec = SPEC.format(method=METHODS[method], epochs=EPOCHS, timeout=RANK_TIMEOUT)
    (folder / "spec.toml").write_text(spec)
    alone = run_ranks(["train", "spec.toml", "--out", "alone", "--quiet"], 1, folder)
    assert alone.codes == [0], alone.logs
    several = run_ranks(["train", "spec.toml", "--out", "several", "--quiet"], 2, folder)
    assert several.codes == [0, 0], several.logs
    assert content(folder / "alone") == content(folder / "several")
    return content(folder / "alone"), several.seconds


def mount(disk: Path) -> bool:
    """Put a small file system of its own at a path, if that is permitted."""
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(disk)]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def campaign(options: argparse.Namespace, home: Path) -> list[Row]:
    """Run all trials."""
    source, rows = random.Random(options.seed), list[Row]()
    kinds = [kind for kind in KINDS if kind != "cut" or not reason_against_hosts()]
    wholes: dict[str, tuple[object, float]] = {}
    import_all(home)
    for number in range(options.faults):
        method, kind, size = source.choice(list(METHODS)), kinds[number % len(kinds)], source.randint(2, 4)
        folder = home / method
        if method not in wholes:
            wholes[method] = undisturbed(method, folder)
        is_torchrun = number % EVERY_TORCHRUN == number // EVERY_TORCHRUN % 3
        size = 2 if is_torchrun else size
        fault = fault_of(kind, source, size)
        row = Row(number, method, size, kind, fault.rank, fault.moment, fault.number)
        is_mounted = kind == "disk" and mount(folder / "disk")
        if kind == "disk" and not is_mounted:
            continue
        try:
            if is_torchrun:
                trial_of_torchrun(row, fault, folder, wholes[method][0])
            else:
                trial(row, fault, source, folder, wholes[method][0])
        finally:
            if is_mounted:
                subprocess.run(["umount", str(folder / "disk")], check=True)
            shutil.rmtree(folder / "disk")
            (folder / "disk").mkdir()
        rows.append(row)
        print(row.wrong or "right", row, flush=True)
    print_summary(rows, {method: seconds for method, (_, seconds) in wholes.items()})
    return rows


def print_summary(rows: list[Row], undisturbed_seconds: dict[str, float]) -> None:
    """Print counts, the slowest end by kind, and goodput: the share of steps, and of time, that was not lost."""
    for kind in dict.fromkeys(row.kind for row in rows):
        chosen = [row for row in rows if row.kind == kind]
        slowest, wrong = max(row.seconds_to_end for row in chosen), sum(bool(row.wrong) for row in chosen)
        print(f"{kind}: {len(chosen)} faults, {wrong} wrong, all ended after at most {slowest:.1f} s")
    counted = [row for row in rows if "torchrun" not in row.recovery]
    needed, repeated = len(counted) * EPOCHS * STEPS, sum(row.steps_repeated for row in counted)
    useful, spent = sum(undisturbed_seconds[row.method] for row in counted), sum(row.seconds for row in counted)
    print(f"{len(rows)} faults: {sum(bool(row.wrong) for row in rows)} wrong")
    share = needed / (needed + repeated)
    print(f"steps trained twice: {repeated} for {needed}; goodput {share:.1%} of steps, {useful / spent:.1%} of time")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=40, help="number of faults")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--csv", type=Path, help="file for a row per fault")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as home:
        rows = campaign(options, Path(home))
    if options.csv is not None:
        with options.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, [entry.name for entry in fields(Row)])
            writer.writeheader()
            writer.writerows(asdict(row) for row in rows)
    return 1 if any(row.wrong for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
