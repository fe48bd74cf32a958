"""Whether a process still runs: a reused id, a restarted machine and another host are not mistaken for it."""

import os
import subprocess
import sys

from sonde.runlog.writer_process import identity, state_of


def test_this_process_runs():
    assert state_of(identity()) == "running"


def test_a_process_that_has_ended_is_gone():
    code = "from sonde.runlog.writer_process import identity; print(identity())"
    text = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    manifest = dict(item.split(": ") for item in text.strip("{}\n").replace("'", "").split(", "))
    manifest |= {"pid": int(manifest["pid"])} | ({"start_ticks": int(manifest["start_ticks"])} if "boot" in manifest else {})
    assert state_of(manifest) == "gone"


def test_a_reused_process_id_is_not_the_same_process():
    assert state_of(identity() | {"boot": identity().get("boot", "x"), "start_ticks": 1}) == "gone"


def test_a_process_from_before_the_machine_was_restarted_is_gone():
    assert state_of(identity() | {"boot": "another"}) == "gone"


def test_another_host_or_container_cannot_be_seen():
    assert state_of(identity() | {"host": "elsewhere"}) == "unknown"
    if "boot" in identity():
        assert state_of(identity() | {"pid_namespace": "pid:[1]"}) == "unknown"


def test_without_a_start_time_the_id_must_do():
    facts = {key: identity()[key] for key in ("host", "pid")}
    assert state_of(facts) == "running"
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    assert state_of(facts | {"pid": child.pid}) == "gone"


def test_nonsense_is_unknown():
    for pid in (None, "1", -1, 0, True, 10**30, 1.5):
        assert state_of({"host": os.uname().nodename, "pid": pid}) in {"unknown", "gone"}
    assert state_of({}) == "unknown"
