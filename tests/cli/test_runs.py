"""The commands train, resume, evaluate and predict; what they call is stood in for."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet
import pytest
import torch
from click.testing import CliRunner
from helpers.commands import last_error, run
from helpers.fake_runs import CLASSIFIER, METRICS, FakeRun, linear_ensemble
from helpers.places import ROOT, TOY_PLUGINS

import ensemblekit as ek
from ensemblekit import api
from ensemblekit.cli import main
from ensemblekit.core.errors import DataError, Interrupted
from ensemblekit.core.hooks import RunHooks
from ensemblekit.display.progress import PlainProgress, Progress
from ensemblekit.inference import writing
from ensemblekit.inference.evaluation import Evaluation

CLASSES = {
    "classes": [
        {"class": "ant", "count": 4, "recall": 0.75, "precision": 1.0, "confused_with": "bee", "confused": 1},
        {"class": "bee", "count": 0, "recall": None, "precision": None, "confused_with": None, "confused": 0},
    ],
    "confusion": [[3, 1], [0, 0]],
}
SPEC = str(ROOT / "specs" / "digits.toml")


class Calls:
    """Stands in for the functions of the Python interface, and remembers how they were called."""

    def __init__(self) -> None:
        self.made: list[tuple] = []
        self.closed = 0
        self.error: Exception | None = None

    def train(self, spec, out=None, progress=True, data=None, plugins=(), name="run") -> FakeRun:
        out = Path(out or f"runs/{name}-1")
        self.made.append(("train", spec, out, progress))
        return self._run(progress, out)

    def resume(self, path, progress=True, plugins=()) -> FakeRun:
        self.made.append(("resume", path, tuple(plugins), progress))
        return self._run(progress, Path(path))

    def evaluate_run(self, path, data=None, plugins=(), device="cpu", per_class=False) -> dict[str, float]:
        self.made.append(("evaluate", path, data, tuple(plugins), device))
        return {**METRICS, **(CLASSES if per_class else {})}

    def load(self, path, plugins=(), device="cpu") -> ek.Ensemble:
        self.made.append(("load", path, tuple(plugins), device))
        weights = torch.tensor([[[1.0, 0], [0, 1]]])
        info = ek.DataInfo("classification", (2,), 2)
        return linear_ensemble(ek.load_spec(CLASSIFIER), weights, info, ("ant", "bee"))

    def _run(self, progress: Progress, path: Path) -> FakeRun:
        finished = FakeRun(path=path)
        hooks = RunHooks([], [progress]).call
        hooks.run_started(spec=finished.spec, path=path, plan=[("data", "digits")])
        close = progress.close
        progress.close = lambda: (close(), setattr(self, "closed", self.closed + 1))
        if self.error:
            raise self.error
        results = {"metrics": finished.metrics, "members": finished.members, "seconds": finished.seconds}
        hooks.run_ended(status="finished", error=None, **results)
        return finished


@pytest.fixture(autouse=True)
def calls(monkeypatch, tmp_path) -> Calls:
    calls = Calls()
    for name in ("train", "resume", "evaluate_run", "load"):
        monkeypatch.setattr(api, name, getattr(calls, name), raising=False)
    monkeypatch.chdir(tmp_path)
    return calls


@pytest.fixture
def table(tmp_path) -> str:
    (tmp_path / "rows.csv").write_text("a,b\n2,1\n0,1\n")
    return "rows.csv"


def test_train_shows_the_plan_and_the_summary(calls):
    result = run("train", SPEC)
    assert result.exit_code == 0, result.stderr
    assert result.stdout.startswith("plan\n")
    assert "the run is in runs/digits-1" in result.stdout
    ((_, spec, out, progress),) = calls.made
    assert (spec, out, type(progress)) == (ek.load_spec(SPEC), Path("runs/digits-1"), PlainProgress)
    assert calls.closed == 2  # by the end of the run and by the command


def test_train_takes_settings_a_device_a_place_and_plugin_files(calls, tmp_path):
    spec = tmp_path / "toy.toml"
    spec.write_text('[data]\nname = "blobs"\n[model]\nname = "linear"\n')
    options = ("--set", "training.epochs=3", "--device", "cpu", "--out", "elsewhere", "--plugin", str(TOY_PLUGINS))
    result = run("train", str(spec), *options)
    assert result.exit_code == 0, result.stderr
    ((_, seen, out, _),) = calls.made
    assert (seen.training.epochs, seen.engine.device, out) == (3, "cpu", Path("elsewhere"))


@pytest.mark.parametrize(
    ("directory", "has_run", "name"),
    [("digits-1", True, "digits"), ("my-run", True, "my-run"), ("2024-12", True, "2024"), ("digits-1", False, "spec")],
)
def test_a_run_of_the_spec_of_another_run_keeps_its_name(calls, tmp_path, directory, has_run, name):
    folder = tmp_path / "elsewhere" / directory
    folder.mkdir(parents=True)
    (folder / "spec.toml").write_text(Path(SPEC).read_text())
    if has_run:
        (folder / "run.json").write_text("{}")
    assert run("train", str(folder / "spec.toml"), "--quiet").stdout == f"runs/{name}-1\n"


def test_quiet_prints_only_where_the_run_is(calls):
    assert run("train", SPEC, "--quiet").stdout == "runs/digits-1\n"
    assert run("resume", "runs/x", "--quiet").stdout == "runs/x\n"
    assert {type(made[3]) for made in calls.made} == {Progress}


def test_json_is_the_final_metrics_and_the_place_and_nothing_else():
    assert json.loads(run("train", SPEC, "--json").stdout) == METRICS | {"path": "runs/digits-1"}
    assert json.loads(run("resume", "runs/x", "--json").stdout) == METRICS | {"path": "runs/x"}


def test_a_wrong_spec_trains_nothing(calls):
    result = run("train", SPEC, "--set", "method.lamda=1", "--device", "tpu")
    assert result.exit_code == 2
    assert 'method.lamda: unknown key; --set method.lamda=1; did you mean "lambda"?' in result.stderr
    assert "engine.device" in result.stderr
    assert calls.made == []


@pytest.mark.parametrize("exit_code", [130, 143])
def test_an_interrupt_says_what_is_saved_and_how_to_go_on(calls, exit_code):
    calls.error = Interrupted(
        "saved at epoch 3", "runs/x", "continue with: ensemblekit resume runs/x", exit_code=exit_code
    )
    result = run("train", SPEC)
    assert result.exit_code == exit_code
    assert last_error(result) == "error: saved at epoch 3; runs/x; continue with: ensemblekit resume runs/x"
    assert "Traceback" not in result.stderr
    assert calls.closed == 1


def test_an_interrupt_is_that_of_ctrl_c_if_nothing_else_is_said():
    assert Interrupted("saved at epoch 3").exit_code == 130
    assert Interrupted("saved at epoch 3", "runs/x").line == "saved at epoch 3; runs/x"


def test_resume_goes_on_with_its_plugin_files(calls):
    result = run("resume", "runs/x", "--plugin", "mine.py")
    assert result.exit_code == 0, result.stderr
    assert calls.made[0][:3] == ("resume", Path("runs/x"), ("mine.py",))
    assert "the run is in runs/x" in result.stdout


def test_evaluate_shows_every_metric(calls):
    result = run("evaluate", "runs/x", "--data", "other.csv", "--plugin", "mine.py")
    assert calls.made == [("evaluate", Path("runs/x"), "other.csv", ("mine.py",), "cpu")]
    lines = [line.split() for line in result.stdout.splitlines()]
    assert lines[0] == ["of", "metric", "value"]
    assert ["members", "test_mean_member_loss", "0.098"] in lines
    assert {line[1] for line in lines[1 : len(METRICS) + 1]} == set(METRICS)
    assert "remainder 0.004\n" in result.stdout


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ((), "1,355 test samples of digits"),
        (("--data", "diabetes"), "1,355 test samples of diabetes"),
        (("--data", '{ name = "cifar10" }'), "1,355 test samples of cifar10"),
    ],
)
def test_evaluate_begins_with_what_was_evaluated(monkeypatch, options, line):
    monkeypatch.setattr(api, "evaluate_run", lambda path, **_: Evaluation(METRICS, 1355, "digits"))
    assert run("evaluate", "runs/x", *options).stdout.splitlines()[0] == line


def test_evaluate_ends_with_what_to_do_next(monkeypatch):
    metrics = {"test_accuracy": 0.9, "test_coverage_at_5_risk": 0.87}
    monkeypatch.setattr(api, "evaluate_run", lambda path, **_: Evaluation(metrics, 1355, "digits"))
    lines = run("evaluate", "runs/x y").stdout.splitlines()
    steps = lines[lines.index("next:") + 1 :]
    assert [step.split("#")[0].strip() for step in steps] == [
        "ensemblekit evaluate 'runs/x y' --ood DATA",
        "ensemblekit evaluate 'runs/x y' --corrupt",
        "ensemblekit predict 'runs/x y' FILES… --abstain-above 0.2",
    ]
    assert steps[-1].endswith("87 % can be answered with at most 5 % errors")
    monkeypatch.setattr(api, "evaluate_run", lambda path, **_: Evaluation({"test_mse": 1.0}, 9, "diabetes"))
    assert "--corrupt" not in run("evaluate", "runs/x").stdout


def test_evaluate_shows_the_classes_and_their_confusion():
    lines = [line.split() for line in run("evaluate", "runs/x").stdout.splitlines()]
    assert ["ant", "4", "75.00", "%", "100.00", "%", "bee", "(1", "times)"] in lines
    assert ["bee", "0"] in lines
    assert lines[-3:] == [["true", "class", "ant", "bee"], ["ant", "3", "1"], ["bee", "·", "·"]]


def test_evaluate_as_json_is_one_flat_object(monkeypatch):
    assert json.loads(run("evaluate", "runs/x", "--json").stdout) == METRICS
    assert json.loads(run("evaluate", "runs/x", "--json", "--per-class").stdout) == METRICS | CLASSES
    monkeypatch.setattr(api, "evaluate_run", lambda path, **options: {"test_nll": float("inf")})
    assert json.loads(run("evaluate", "runs/x", "--json").stdout) == {"test_nll": None}


def test_predict_prints_csv(table):
    lines = run("predict", "runs/x", table).stdout.splitlines()
    assert lines[0] == "file,row,class,probability,agreement,entropy,mutual_information"
    assert [line.split(",")[:3] for line in lines[1:]] == [["rows.csv", "1", "ant"], ["rows.csv", "2", "bee"]]


@pytest.mark.parametrize("name", ["out.xlsx", "out.pq", "out.tsv"])
def test_predict_refuses_an_extension_of_no_format_unless_one_is_chosen(table, tmp_path, name):
    output = tmp_path / name
    result = run("predict", "runs/x", table, "--output", str(output))
    assert result.exit_code == 2
    assert f'no format has the extension "{output.suffix}"' in last_error(result)
    assert not output.exists()
    assert run("predict", "runs/x", table, "--output", str(output), "--format", "csv").exit_code == 0
    assert output.read_text().startswith("file,row,class")


@pytest.mark.parametrize("name", ["out", "out.txt", "OUT.CSV"])
def test_predict_writes_csv_to_text_files_and_files_without_an_extension(table, tmp_path, name):
    assert run("predict", "runs/x", table, "--output", str(tmp_path / name)).exit_code == 0
    assert (tmp_path / name).read_text().startswith("file,row,class")


@pytest.mark.parametrize("option", [("--format", "json"), ("--json",)])
def test_predict_prints_json(table, option):
    assert [answer["class"] for answer in json.loads(run("predict", "runs/x", table, *option).stdout)] == ["ant", "bee"]


@pytest.mark.parametrize(("name", "first"), [("out.csv", "file,row"), ("out.json", "[\n"), ("out.txt", "file,row")])
def test_predict_writes_a_file_in_the_format_of_its_name(table, name, first, tmp_path):
    result = run("predict", "runs/x", table, "--output", name)
    assert (result.exit_code, result.stdout) == (0, "")
    assert (tmp_path / name).read_text().startswith(first)


def test_a_bad_file_is_named_and_the_others_are_predicted(table, tmp_path):
    (tmp_path / "bad.csv").write_text("a,b\n1,oops\n")
    result = run("predict", "runs/x", "bad.csv", table, "--output", "out.csv")
    assert result.exit_code == DataError.exit_code
    assert last_error(result).startswith("error: expected a finite number, got 'oops'; bad.csv, row 1")
    assert [line.split(",")[0] for line in (tmp_path / "out.csv").read_text().splitlines()[1:]] == ["rows.csv"] * 2
    printed = run("predict", "runs/x", table, "bad.csv", "missing.csv", "none*.csv", "--json")
    assert printed.exit_code == DataError.exit_code
    assert len(json.loads(printed.stdout)) == 2
    lines = printed.stderr.splitlines()
    assert [line.split("; ")[1] for line in lines[:-1]] == ["none*.csv", 'bad.csv, row 1, column "b"', "missing.csv"]
    assert lines[-1] == "error: 3 of 4 files could not be predicted; each is listed above"


def test_where_no_file_is_good_nothing_is_written(tmp_path):
    (tmp_path / "bad.csv").write_text("a,b\n1,oops\n")
    (tmp_path / "out.csv").write_text("older")
    result = run("predict", "runs/x", "bad.csv", "missing.csv", "--output", "out.csv")
    assert result.exit_code == DataError.exit_code
    assert (tmp_path / "out.csv").read_text() == "older"
    assert run("predict", "runs/x", "bad.csv").stdout == ""


def test_predict_takes_folders_patterns_and_standard_input(tmp_path, table):
    (tmp_path / "new" / "more").mkdir(parents=True)
    for name in ("b.csv", "more/a.CSV", "notes.txt", ".hidden.csv"):
        (tmp_path / "new" / name).write_text("a,b\n2,1\n")
    for arguments in (("new",), ("new/**/*.[cC][sS][vV]",), ("new/b.csv", "new/more")):
        lines = run("predict", "runs/x", *arguments).stdout.splitlines()[1:]
        assert [line.split(",")[0] for line in lines] == ["new/b.csv", "new/more/a.CSV"], arguments
    piped = CliRunner().invoke(main, ["predict", "runs/x", "-"], input="a,b\n0,1\n")
    assert piped.stdout.splitlines()[1].startswith("-,1,bee,")
    bad = CliRunner().invoke(main, ["predict", "runs/x", "-"], input="a,b\n0,oops\n")
    assert "got 'oops'; -, row 1" in last_error(bad)
    (tmp_path / "empty").mkdir()
    assert "no .csv files in the folder; empty" in last_error(run("predict", "runs/x", "empty"))


def test_predict_adds_all_probabilities_and_members_on_request(table):
    answer = json.loads(run("predict", "runs/x", table, "--json", "--probabilities", "--members").stdout)[0]
    assert list(answer)[7:] == ["probability[ant]", "probability[bee]", "member_class[0]", "member_probability[0]"]
    assert answer["probability[ant]"] + answer["probability[bee]"] == pytest.approx(1)
    assert answer["member_class[0]"] == "ant"


def test_predictions_have_no_digits_that_float32_does_not_have(table):
    for line in run("predict", "runs/x", table).stdout.splitlines()[1:]:
        for number in line.split(",")[3:]:
            assert len(number.replace("-", "").replace(".", "").lstrip("0")) <= 9 or "e" in number


@pytest.mark.parametrize("options", [("--format", "parquet", "--output", "out.data"), ("--output", "out.parquet")])
def test_parquet_has_the_same_records(table, options, tmp_path):
    result = run("predict", "runs/x", table, *options)
    assert result.exit_code == 0, result.stderr
    expected = json.loads(run("predict", "runs/x", table, "--json").stdout)
    assert pyarrow.parquet.read_table(tmp_path / options[-1]).to_pylist() == expected


def test_parquet_needs_a_file_and_pyarrow(table, monkeypatch):
    assert "--output FILE.parquet" in last_error(run("predict", "runs/x", table, "--format", "parquet"))
    monkeypatch.setattr(writing, "find_spec", lambda name: None)
    result = run("predict", "runs/x", table, "--output", "out.parquet")
    assert result.exit_code == 2
    assert "pip install 'ensemblekit[parquet]'" in last_error(result)


@pytest.mark.faults
@pytest.mark.parametrize("name", ["out.csv", "out.json", "out.parquet"])
def test_a_full_disk_leaves_the_older_file_as_it_was(table, name, tmp_path):
    (tmp_path / name).write_text("older")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, limits[1]))
    try:
        result = run("predict", "runs/x", table, "--output", name)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert result.exit_code == 7, result.stderr
    assert "disk full" in last_error(result)
    assert (tmp_path / name).read_text() == "older"
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([name, "rows.csv"])


def test_a_link_a_mode_and_a_device_stay_what_they_are(table, tmp_path):
    (tmp_path / "target.csv").write_text("older")
    (tmp_path / "target.csv").chmod(0o600)
    (tmp_path / "link.csv").symlink_to("target.csv")
    assert run("predict", "runs/x", table, "--output", "link.csv").exit_code == 0
    assert (tmp_path / "link.csv").is_symlink()
    assert (tmp_path / "target.csv").read_text().startswith("file,row")
    assert (tmp_path / "target.csv").stat().st_mode & 0o777 == 0o600
    assert run("predict", "runs/x", table, "--output", "/dev/null").exit_code == 0
    assert Path("/dev/null").is_char_device()


def test_an_output_that_is_not_finite_is_exit_code_6_and_names_the_row(tmp_path):
    (tmp_path / "large.csv").write_text("a,b\n1,1\n3e38,3e38\n")
    (tmp_path / "out.csv").write_text("older")
    spec = ek.load_spec(CLASSIFIER)
    ensemble = linear_ensemble(spec, torch.full((1, 2, 2), 2.0), ek.DataInfo("classification", (2,), 2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(api, "load", lambda path, plugins, device: ensemble)
        result = run("predict", "runs/x", "large.csv", "--output", "out.csv")
    assert result.exit_code == 6
    assert "first for large.csv, row 2" in last_error(result)
    assert (tmp_path / "out.csv").read_text() == "older"


@pytest.mark.parametrize("command", [("evaluate",), ("predict", "rows.csv")])
def test_evaluate_and_predict_compute_on_a_device(command, calls, table):
    run(command[0], "runs/x", *command[1:], "--device", "cuda:1")
    assert calls.made[-1][-1] == "cuda:1"


def test_a_place_that_cannot_be_written_is_named(table):
    result = run("predict", "runs/x", table, "--output", "nowhere/out.csv")
    assert result.exit_code == 2
    assert "cannot be written" in last_error(result)
    assert "nowhere/out.csv" in last_error(result)


@pytest.mark.parametrize(
    ("arguments", "part"),
    [(("predict", "runs/x"), "Missing argument 'FILES…"), (("train",), "Missing argument 'SPEC'")],
)
def test_a_call_without_its_arguments_says_what_is_missing(arguments, part):
    result = run(*arguments)
    assert result.exit_code == 2
    assert part in last_error(result)


def test_the_help_of_the_commands_needs_no_torch():
    code = (
        "import sys, ensemblekit.cli\n"
        "for command in ('train', 'resume', 'evaluate', 'predict'):\n"
        "    try: ensemblekit.cli.main([command, '--help'])\n"
        "    except SystemExit as stop: assert stop.code == 0\n"
        "assert not {'torch', 'pydantic', 'rich'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
