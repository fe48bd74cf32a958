"""The commands that read: right answers, right exit codes, letters for bad input. None of them needs torch."""

import json
import os
import subprocess
import sys

import pytest

BLOCK_TORCH = "import sys; sys.modules['torch'] = None; from sonde.cli import main; main()"


def test_diagnose_names_the_root_cause_and_exits_with_1(sonde, broken_run):
    child = sonde("diagnose", str(broken_run))
    assert child.returncode == 1
    assert "missing-zero-grad" in child.stdout
    assert child.stderr == ""


def test_diagnose_of_a_healthy_run_exits_with_0(sonde, healthy_run):
    child = sonde("diagnose", str(healthy_run))
    assert child.returncode == 0
    assert child.stdout.startswith("✓ healthy")


def test_without_a_run_the_newest_is_meant(sonde, healthy_run, broken_run):
    newest = json.loads((broken_run / "run.json").read_text())
    (broken_run / "run.json").write_text(json.dumps(newest | {"started": newest["started"] + 100}))
    assert json.loads(sonde("diagnose", "--json").stdout)["run"] == "broken"
    (broken_run / "run.json").write_text(json.dumps(newest | {"started": newest["started"] - 100}))
    assert json.loads(sonde("diagnose", "--json").stdout)["run"] == "healthy"


def test_diagnose_as_json_is_one_document_on_stdout(sonde, broken_run):
    child = sonde("diagnose", "--json")
    assert child.returncode == 1
    assert json.loads(child.stdout)["verdict"] == "problems"


def test_reading_works_where_torch_cannot_be_imported(broken_run, tmp_path):
    command = [sys.executable, "-c", BLOCK_TORCH, "diagnose", "--json"]
    child = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert json.loads(child.stdout)["findings"][0]["rule"] == "missing-zero-grad"


def test_another_directory_of_runs_can_be_set(sonde, broken_run, tmp_path):
    (tmp_path / "runs").rename(tmp_path / "elsewhere")
    assert sonde("diagnose").returncode == 2
    assert sonde("diagnose", SONDE_OUTPUT_DIR="elsewhere").returncode == 1


@pytest.mark.parametrize("suffix", ["html", "md", "json"])
def test_report_writes_each_format_and_says_where(sonde, broken_run, tmp_path, suffix):
    child = sonde("report", "-o", f"out.{suffix}")
    assert (child.returncode, child.stdout) == (0, f"out.{suffix}\n")
    assert "missing-zero-grad" in (tmp_path / f"out.{suffix}").read_text(encoding="utf-8")


def test_r72_report_keeps_what_is_there_unless_forced(sonde, broken_run, tmp_path):
    (tmp_path / "out.md").write_text("mine")
    child = sonde("report", "-o", "out.md")
    assert child.returncode == 2
    assert "exists already. Give another name, or --force" in child.stderr
    assert (tmp_path / "out.md").read_text() == "mine"
    assert sonde("report", "-o", "out.md", "--force").returncode == 0
    assert "missing-zero-grad" in (tmp_path / "out.md").read_text(encoding="utf-8")


def test_runs_lists_every_run_with_steps_verdict_finding_and_loss(sonde, healthy_run, broken_run, sample_run):
    sample_run("crashed", [1.0] * 7, ending={"how": "exception", "exception": "ValueError: bad"})
    sample_run("empty", [])
    rows = {line.split()[0]: line for line in sonde("runs").stdout.splitlines()}
    assert rows["run"].split() == ["run", "started", "steps", "verdict", "loss", "first", "finding"]
    assert rows["healthy"].split()[3:] == ["100", "✓", "healthy", "0.112"]
    assert rows["broken"].split()[3:] == ["70", "✗", "problems", "NaN", "missing-zero-grad"]
    assert rows["crashed"].endswith("(exception)")
    assert rows["empty"].split()[3:] == ["0", "?", "unknown", "–"]


def test_in_a_narrow_terminal_runs_leaves_out_the_time_of_a_name(sonde, sample_run):
    name = "2026-01-02_03-04-05_my-training-script_00ab"
    sample_run(name, [2.0 * 0.98**i for i in range(60)])
    assert sonde("runs").stdout.splitlines()[1].startswith(f"{name}  ")
    sample_run("2026-01-02_03-04-06_" + "a-long-name-" * 4 + "00cd", [2.0 * 0.98**i for i in range(60)])
    rows = sonde("runs").stdout.splitlines()[1:]
    assert any(row.startswith("my-training-script_00ab  ") for row in rows)
    assert sonde("diagnose", "my_training_script_00ab").returncode == 0


def test_runs_shows_a_dash_for_what_it_had_no_time_to_judge(sonde, healthy_run):
    (log,) = healthy_run.glob("*.sonde")
    os.truncate(log, 1 << 30)  # sparse: too large for two seconds
    row, hint = sonde("runs").stdout.splitlines()[1:]
    assert row.split()[3:] == ["–", "–", "–", "–"]
    assert hint == "–  1 run not judged in time: sonde diagnose healthy"


def test_text_of_a_cached_verdict_cannot_command_the_terminal(sonde, broken_run):
    assert sonde("diagnose").returncode == 1
    file = broken_run / "verdict.json"
    content = json.loads(file.read_text())
    content["report"] |= {"rule": "\x1b[31mred", "where": "\u202e4", "last_loss": "\x07", "ended": "\x1b[2J"}
    file.write_text(json.dumps(content))
    shown = sonde("runs").stdout
    assert "\\x1b[31mred in \\u202e4" in shown
    assert "\x1b" not in shown


def test_runs_shows_as_many_as_wanted_and_counts_the_rest(sonde, sample_run):
    for number in range(5):
        sample_run(f"run{number}", [1.0])
    lines = sonde("runs", "-n", "2").stdout.splitlines()
    assert len(lines) == 4
    assert "3 more runs" in lines[-1]


@pytest.mark.parametrize(("losses", "code", "checked"), [([1.0] * 0, 0, 3), ([2.0 * 0.95**i for i in range(100)], 0, 0)])
def test_check_makes_an_unknown_verdict_exit_code_3(sonde, sample_run, losses, code, checked):
    sample_run("one", losses)
    assert sonde("diagnose").returncode == code
    assert sonde("diagnose", "--check").returncode == checked


def test_check_of_problems_is_exit_code_1(sonde, broken_run):
    assert sonde("diagnose", "--check").returncode == 1


@pytest.mark.parametrize("suffix", ["html", "md", "json"])
def test_an_unknown_verdict_is_never_shown_as_healthy(sonde, sample_run, tmp_path, suffix):
    sample_run("one", [])
    assert sonde("report", "-o", f"out.{suffix}").returncode == 0
    text = (tmp_path / f"out.{suffix}").read_text().partition("</style>")
    assert "unknown" in (text[2] or text[0]).lower()
    assert "healthy" not in (text[2] or text[0]).lower()
    assert "healthy" not in sonde("diagnose").stdout
    assert "healthy" not in sonde("runs").stdout


def test_explain_shows_the_page_of_every_rule(sonde):
    listed = [line.split()[0] for line in sonde("explain").stdout.splitlines() if not line.startswith(" ")]
    assert len(listed) >= 16
    page = sonde("explain", "missing_zero_grad").stdout
    for part in ("missing-zero-grad", "What it finds", "How it knows", "Known problems", "Fix"):
        assert part in page


def test_compact_names_the_parquet_files_that_it_wrote(sonde, broken_run, tmp_path):
    pytest.importorskip("pyarrow")
    child = sonde("compact")
    assert child.returncode == 0, child.stderr
    paths = [tmp_path / line for line in child.stdout.splitlines()]
    assert paths
    assert all(path.suffix == ".parquet" and path.exists() for path in paths)


# ---- bad input


def test_an_empty_or_foreign_directory_is_no_run(sonde, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "notes.txt").write_text("hello")
    for name in ("empty", "foreign"):
        child = sonde("diagnose", name)
        assert child.returncode == 2
        assert f"No run in {name}: expected run.json" in child.stderr


def test_a_damaged_run_is_judged_by_what_is_left_and_says_so(sonde, broken_run):
    (log,) = broken_run.glob("*.sonde")
    content = bytearray(log.read_bytes())
    middle = len(content) // 2
    content[middle : middle + 50] = b"\xa5" * 50
    log.write_bytes(content)
    child = sonde("diagnose")
    assert child.returncode == 1
    assert "missing-zero-grad" in child.stdout
    assert "could not be read" in " ".join(child.stdout.split())


@pytest.mark.parametrize("content", [b"", b"\0" * 5000, b"not a log at all", b"\x80\x04cposix\nsystem\n"])
def test_a_log_that_is_none_gives_no_verdict_and_no_traceback(sonde, broken_run, content):
    (log,) = broken_run.glob("*.sonde")
    log.write_bytes(content)
    child = sonde("diagnose")
    assert "Traceback" not in child.stderr
    assert child.returncode in (0, 2)
    assert "healthy" not in child.stdout


def test_a_report_that_cannot_be_written_gets_a_letter(sonde, broken_run, tmp_path):
    child = sonde("report", "-o", "missing/out.html")
    assert child.returncode == 2
    assert "missing/out.html cannot be written: No such file or directory" in child.stderr


def test_doctor_says_what_is_there_and_what_to_mend(sonde, tmp_path):
    child = sonde("doctor")
    for name in ("sonde", "python", "torch", "runs", "cores", "pyarrow"):
        assert f" {name} " in child.stdout
    assert child.returncode == int("✗" in child.stdout)


def test_doctor_without_torch_says_what_to_install(tmp_path):
    code = "import importlib.util as u, sys; find = u.find_spec\n"
    code += "u.find_spec = lambda name, *rest: None if name == 'torch' else find(name, *rest)\n"
    code += "from sonde.cli import main; main(['doctor'])"
    child = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert child.returncode == 1
    assert "pip install torch" in child.stdout


def test_doctor_says_when_runs_cannot_be_written(sonde, tmp_path):
    (tmp_path / "runs").write_text("a file in its place")
    child = sonde("doctor")
    assert child.returncode == 1
    assert "cannot be written to" in child.stdout
