"""Whether a process still runs: a reused id, a restarted machine and another host are not mistaken for it."""

import os
import subprocess
import sys

from sonde.runlog.is_writer_running import process_identity, process_state


def test_this_process_runs():
    assert process_state(process_identity()) == "running"


def test_a_process_that_has_ended_is_gone():
    code = "from sonde.runlog.is_writer_running import process_identity; print(process_identity())"
    text = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    manifest = dict(item.split(": ") for item in text.strip("{}\n").replace("'", "").split(", "))
    manifest |= {"pid": int(manifest["pid"])} | ({"start_ticks": int(manifest["start_ticks"])} if "boot" in manifest else {})
    assert process_state(manifest) == "gone"


def test_a_reused_process_id_is_not_the_same_process():
    assert process_state(process_identity() | {"boot": process_identity().get("boot", "x"), "start_ticks": 1}) == "gone"


def test_a_process_from_before_the_machine_was_restarted_is_gone():
    assert process_state(process_identity() | {"boot": "another"}) == "gone"


def test_another_host_or_container_cannot_be_seen():
    assert process_state(process_identity() | {"host": "elsewhere"}) == "unknown"
    if "boot" in process_identity():
        assert process_state(process_identity() | {"pid_namespace": "pid:[1]"}) == "unknown"


def test_without_a_start_time_the_id_must_do():
    facts = {key: process_identity()[key] for key in ("host", "pid")}
    assert process_state(facts) == "running"
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    assert process_state(facts | {"pid": child.pid}) == "gone"


def test_nonsense_is_unknown():
    for pid in (None, "1", -1, 0, True, 10**30, 1.5):
        assert process_state({"host": os.uname().nodename, "pid": pid}) in {"unknown", "gone"}
    assert process_state({}) == "unknown"
