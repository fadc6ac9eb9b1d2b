"""Rows that measure against hand-written loops, torchensemble and torchvision."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from fitting import (
    CPU,
    NaiveFit,
    OurFit,
    PeerFit,
    chosen_engine,
    clothing,
    digits,
    fitted_in_turn,
    timed_in_turn,
    with_adam,
)
from measured import Measured, Options, Row, against_naive, duel, faster, workload

import ensemblekit as ek
from ensemblekit.bench.contestants import NAIVE, OURS, pipeline_contest
from ensemblekit.bench.timing import Timing, interleaved
from ensemblekit.bench.workloads import SEED, all_workloads

ROOT = Path(__file__).parent.parent.parent
PEER = "torchensemble"


def resnet_32(options: Options) -> Iterator[Measured]:
    work = "ResNet W=32, M=16, B=128, 3×32×32, GNCL λ=0.5"
    yield against_naive("real-convolutions", work, "≥ 1.5×", options)


def resnet_16(options: Options) -> Iterator[Measured]:
    shape = "ResNet W=16, M=8, B=128, Fashion-MNIST"
    yield against_naive("small-convolutions", f"{shape}, GNCL", "≥ 1.6×", options)
    data, source = clothing(*((16, 16) if options.smoke else (10 * 128, 2000)))
    peer = PeerFit("BaggingClassifier", with_adam(workload("small-weighted", options)), data, epochs=8)
    yield against_peer(f"{shape}, bagging", "≥ 2×", peer, source, options)


def resnet_16_busy(options: Options) -> Iterator[Measured]:
    with busy_core():
        work = "ResNet W=16, M=8, B=128, Fashion-MNIST, GNCL, one core busy"
        yield against_naive("small-convolutions", work, "≥ 3×", options)


@contextmanager
def busy_core() -> Iterator[None]:
    """Another process that keeps one core busy."""
    core = max(os.sched_getaffinity(0))
    spin = f"import os\nos.sched_setaffinity(0, {{{core}}})\nwhile True: pass"
    child = subprocess.Popen([sys.executable, "-c", spin])
    try:
        yield
    finally:
        child.kill()
        child.wait()


def mlp(members: int, naive_asked: str, peer_asked: str, options: Options) -> Iterator[Measured]:
    """Whole fits on the digits, including reading the data."""
    epochs, rounds = (1, 1) if options.smoke else (4, 5)
    data, work = digits(128 if options.smoke else None), f"MLP on digits, M={members}"
    size = {"members": members}
    fast_learning = {"optimizer": {"name": "adabelief", "lr": 1e-2}}
    coupled = all_workloads()["tiny-16"].changed(ensemble=size, training=fast_learning)
    engine = chosen_engine(coupled)
    fits = {NAIVE: NaiveFit(coupled, data, epochs), OURS: OurFit(coupled, data, epochs, engine)}
    timings, learned = fitted_in_turn(fits, rounds, must_hold=not options.smoke)
    note = f"engine {engine}, GNCL λ=0.5, AdaBelief, epochs: {epochs}; {learned}"
    yield faster(work, "naive loop", naive_asked, timings[NAIVE], timings[OURS], note)
    separate = with_adam(all_workloads()["tiny-uncoupled"].changed(ensemble=size))
    peer = PeerFit("VotingClassifier", separate, data, epochs)
    yield against_peer(work, peer_asked, peer, "digits", options)


def against_peer(work: str, asked: str, peer: PeerFit, source: str, options: Options) -> Measured:
    """Whole fits against a classifier of torchensemble with the same data, members and optimizer."""
    engine = chosen_engine(peer.workload)
    # Torchensemble averages probabilities, so accuracies are compared with averaged probabilities. Its boosting sums
    # outputs and fits residuals by least squares: another algorithm, whose accuracy ours must reach and may exceed.
    averages = peer.classifier != "GradientBoostingClassifier"
    fits = {PEER: peer, OURS: OurFit(peer.workload, peer.data, peer.epochs, engine, average_probabilities=averages)}
    must_hold = source != "random images" and not options.smoke
    timings, learned = fitted_in_turn(fits, 1 if options.smoke else 3, must_hold, ours_may_be_better=not averages)
    training = f"{source}, {len(peer.data.train):,} samples, Adam, epochs: {peer.epochs}"
    note = f"{peer.classifier}, {training}, engine {engine}; {learned}"
    return faster(work, PEER, asked, timings[PEER], timings[OURS], note)


def whole_run(members: int, options: Options) -> Iterator[Measured]:
    """The command and the script, each as a process from start to end."""
    epochs = 1 if options.smoke else 30
    script = [sys.executable, str(Path(__file__).with_name("naive_digits.py"))]
    script += ["--members", str(members), "--epochs", str(epochs)]
    timings, accuracy = timed_command(members, epochs, {"script": script}, 1 if options.smoke else 3)
    work = f"whole `ensemblekit train specs/digits.toml`, M={members}"
    included = "wall clock with start-up, evaluation and, ours only, checkpoints"
    note = f"{epochs} epochs, {included}; test accuracy {accuracy:.3f}"
    yield faster(work, "naive script", "≥ 1×", timings["script"], timings[OURS], note)


def timed_command(
    members: int, epochs: int, others: Mapping[str, list[str]], rounds: int
) -> tuple[dict[str, Timing], float]:
    """Run `ensemblekit train specs/digits.toml` in turn with other commands; returns timings and our accuracy."""
    out = Path(tempfile.mkdtemp(), "run")
    command = [sys.executable, "-m", "ensemblekit", "train", str(ROOT / "specs" / "digits.toml"), "--quiet"]
    command += ["--set", f"ensemble.members={members}", "--set", f"training.epochs={epochs}", "--out", str(out)]

    def run(arguments: list[str]) -> None:
        shutil.rmtree(out, ignore_errors=True)
        subprocess.run(arguments, check=True, stdout=subprocess.DEVNULL)

    commands = {**others, OURS: command}
    timings = timed_in_turn({name: partial(run, arguments) for name, arguments in commands.items()}, rounds)
    accuracy = ek.evaluate_run(out)["test_accuracy"]
    shutil.rmtree(out.parent)
    return timings, accuracy


def snapshot(options: Options) -> Iterator[Measured]:
    yield against_naive("snapshot-16", "snapshot, M=16", "≥ 6×", options, "a loop that runs all copies")
    cycles = 16
    here = with_adam(workload("snapshot-16", options)).changed(method={"cycles": cycles})
    data, source = clothing(*((16, 16) if options.smoke else (20 * 128, 2000)))
    peer = PeerFit("SnapshotEnsembleClassifier", here, data, epochs=cycles)
    yield against_peer("snapshot, M=16", "≥ 1.2×", peer, source, options)


def boosting(options: Options) -> Iterator[Measured]:
    data, source = clothing(*((16, 16) if options.smoke else (10 * 128, 2000)))
    peer = PeerFit("GradientBoostingClassifier", with_adam(workload("boosting-8", options)), data, epochs=2)
    yield against_peer("boosting, joint schedule, M=8", "≥ 3×", peer, source, options)


def pipeline(options: Options) -> Iterator[Measured]:
    here = workload("data-pipeline", options)
    images, source = None, "random images of CIFAR-100's shape"
    if options.cifar100 is not None:
        dataset = ek.datasets()["image_folder"].load()(path=options.cifar100, limit_train=here.batch_size * here.steps)
        images, source = ek.load_data(dataset, SEED).train.inputs, "CIFAR-100"
    contest = pipeline_contest(here, CPU, images)
    with ExitStack() as stack:
        timings = interleaved({name: make(stack) for name, make in contest.makers.items()}, here.rounds)
    against = "torchvision per image in a DataLoader, 0 workers"
    yield faster(f"crop + flip + normalise on {source}", against, "≥ 20×", timings[NAIVE], timings[OURS], source)


def inference(options: Options) -> Iterator[Measured]:
    here = workload("inference-16", options)
    timings = duel(here, OURS)
    yield faster("ensemble inference, W=32, M=16, batch 256", "naive loop", "≥ 3.5×", *timings, "")


ROWS_AGAINST_OTHERS: dict[str, Row] = {
    "resnet-32": resnet_32,
    "resnet-16": resnet_16,
    "resnet-16-busy": resnet_16_busy,
    "mlp-64": partial(mlp, 64, "≥ 10×", "≥ 20×"),
    "mlp-16": partial(mlp, 16, "≥ 6×", "≥ 9×"),
    "whole-4": partial(whole_run, 4),
    "whole-8": partial(whole_run, 8),
    "whole-16": partial(whole_run, 16),
    "snapshot": snapshot,
    "boosting": boosting,
    "pipeline": pipeline,
    "inference": inference,
}
