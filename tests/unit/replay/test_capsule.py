"""A capsule stores a step completely or lists what it left out, and reading any capsule executes nothing."""

from __future__ import annotations

import json
import os
import pickle
import signal
import struct
import subprocess
import sys
from collections import namedtuple
from dataclasses import dataclass

import numpy as np
import pytest

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")

from hypothesis import HealthCheck, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from torch import nn  # noqa: E402

from sonde.errors import SondeError  # noqa: E402
from sonde.nonfinite.origin_types import Origin, TensorSummary  # noqa: E402
from sonde.replay.capsule.create_capsule import load_capsule, save_capsule  # noqa: E402
from sonde.replay.capsule.value_serialization import LeftOut, fill_left_out  # noqa: E402


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5))
        self.head = nn.Linear(8, 2)

    def forward(self, x, scale=1.0):
        return self.head(self.body(x)) * scale


ORIGIN = Origin(
    kind="nan", phase="forward", operation="log", module="head", source="train.py:41", text="p = x.log()", cause="log of 3 zeros",
    fix="clamp", key="log-of-zero", samples=(1, 2),
    inputs=(TensorSummary("input", (2, 3), "float32", 6, float("-inf"), float("nan"), 3, 1, 1),),
)  # fmt: skip


def save(directory, model=None, args=(), kwargs=None, **rest):
    return save_capsule(directory, **({"step": 41, "model": model or Net(), "args": args, "kwargs": kwargs or {}} | rest))


def saved(directory, *args, **rest):
    return load_capsule(save(directory, *args, **rest))


@pytest.fixture
def capsule(tmp_path):
    """A valid capsule, to be damaged."""
    return save(tmp_path, args=(torch.ones(3, 4),), kwargs={"scale": 2.0}, origin=ORIGIN, rng=torch.get_rng_state())


# ---- the round trip


def test_a_step_is_read_as_it_was_saved(tmp_path):
    model = Net()
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(5, 4)).sum().backward()
    optimizer.step()
    model.body.eval()
    state, x, y = torch.get_rng_state(), torch.randn(5, 4), torch.tensor([1, 0, 1])
    rest = {"rng": state, "loss_inputs": {"y": y}, "origin": ORIGIN, "about": {"script": "train.py"}}
    path = save(tmp_path, model, (x,), {"scale": 0.5}, optimizer=optimizer, **rest)
    found = load_capsule(path)
    assert path.name == "step-000041"
    assert (found.step, found.model_class, found.kwargs, found.about) == (41, "Net", {"scale": 0.5}, {"script": "train.py"})
    assert torch.equal(found.args[0], x)
    assert torch.equal(found.loss_inputs["y"], y)
    assert torch.equal(found.rng["torch"], state)
    assert repr(found.origin) == repr(ORIGIN)
    assert {name: slot.values.tolist() for name, slot in found.parameters.items()} == {n: p.tolist() for n, p in model.named_parameters()}
    assert {name: slot.values.tolist() for name, slot in found.buffers.items()} == {n: b.tolist() for n, b in model.named_buffers()}
    assert found.training == {"", "head"}
    assert found.left_out == ()
    assert all(stored.values is not None for stored in found.parameters.values())


def test_the_state_of_an_optimizer_can_be_loaded_into_another(tmp_path):
    model, second = Net(), Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.3)
    model(torch.randn(5, 4)).sum().backward()
    optimizer.step()
    other = torch.optim.Adam(second.parameters())
    other.load_state_dict(saved(tmp_path, model, optimizer=optimizer).optimizer)
    assert other.param_groups[0]["lr"] == 0.3
    assert torch.equal(other.state[second.head.weight]["exp_avg"], optimizer.state[model.head.weight]["exp_avg"])


Pair = namedtuple("Pair", "left right")


@dataclass
class Batch:
    x: torch.Tensor
    name: str


def test_nested_inputs_keep_their_structure_and_a_tensor_passed_twice_is_one_tensor(tmp_path):
    x = torch.arange(6.0).reshape(2, 3)
    value = [None, True, 7, -0.0, float("inf"), "ä\ud800\x00", (x, [x]), {"k": x, 3: (), None: 1j}, np.arange(3), torch.float16, x.T]
    found = saved(tmp_path, args=(value, Pair(1, x), Batch(x, "b"))).args
    again, pair, batch = found
    assert repr(again[:6]) == repr(value[:6])
    assert again[6][0] is again[6][1][0] is again[7]["k"]
    assert again[7][3] == ()
    assert again[7][None] == 1j
    assert isinstance(again[8], np.ndarray)
    assert again[8].tolist() == [0, 1, 2]
    assert again[9] is torch.float16
    assert torch.equal(again[10], x.T)
    assert pair.left == 1
    assert batch.name == "b"
    assert torch.equal(batch.x, x)


DTYPES = (torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.bool, torch.complex64, torch.float8_e5m2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_is_stored_bit_for_bit(tmp_path, dtype):
    x = torch.tensor([0.0, 1.0, -1.0, 0.1]).to(dtype)
    (found,) = saved(tmp_path, args=(x,)).args
    assert found.dtype is dtype
    assert torch.equal(found.view(torch.uint8), x.view(torch.uint8))


def test_non_finite_numbers_are_stored(tmp_path):
    (found,) = saved(tmp_path, args=(torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0]),)).args
    assert repr(found.tolist()) == "[nan, inf, -inf, -0.0]"


def test_a_packed_sequence_is_stored(tmp_path):
    packed = nn.utils.rnn.pack_sequence([torch.ones(3, 2), torch.zeros(2, 2)])
    (found,) = saved(tmp_path, args=(packed,)).args
    assert isinstance(found, nn.utils.rnn.PackedSequence)
    assert torch.equal(found.data, packed.data)


def test_tied_weights_and_unusual_names_are_stored(tmp_path):
    model = nn.Module()
    model.first = model.second = nn.Linear(2, 2)
    for name in ("\ud800", "/etc/passwd", "x" * 5000, "a%b", "__metadata__"):
        model.register_buffer(name, torch.ones(2))
    found = saved(tmp_path, model)
    assert list(found.parameters) == ["first.weight", "first.bias"]
    assert list(found.buffers) == ["\ud800", "/etc/passwd", "x" * 5000, "a%b", "__metadata__"]


@pytest.mark.needs_bfloat16("linear")
def test_autocast_and_grad_mode_are_stored(tmp_path):
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        found = saved(tmp_path)
    assert found.autocast == {"cpu": torch.bfloat16}
    assert not found.is_grad_enabled


def test_values_that_cannot_be_stored_are_listed(tmp_path):
    x = torch.ones(2, requires_grad=True)
    found = saved(tmp_path, args=(len, x * 2, torch.ones(2, 2).to_sparse(), torch.empty(3, device="meta"), 2**70, {object(): 1}))
    assert isinstance(found.args[0], LeftOut)
    assert torch.equal(found.args[1], torch.full((2,), 2.0))
    assert found.args[1].requires_grad
    assert [line.split(":")[0] for line in found.left_out] == [f"args.{i}" for i in range(6)]


def test_a_value_that_contains_itself_is_truncated(tmp_path):
    value: list = []
    value.append(value)
    assert "deeper than" in saved(tmp_path, args=(value,)).left_out[0]


def test_saving_changes_nothing(tmp_path):
    model, x = Net(), torch.randn(3, 4, requires_grad=True)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    versions = [p._version for p in model.parameters()]
    state = torch.get_rng_state()
    save(tmp_path, model, (x,), optimizer=torch.optim.SGD(model.parameters(), lr=1.0))
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert [p._version for p in model.parameters()] == versions
    assert x.requires_grad
    assert x.grad is None


texts = st.text(st.characters(), max_size=8)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats() | texts,
    lambda inner: st.lists(inner, max_size=3) | st.tuples(inner, inner) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=10,
)


@given(value=values)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_plain_value_is_stored(tmp_path, value):
    found = saved(tmp_path, nn.Identity(), (value,))
    assert repr(found.args[0]) == repr(value)


def test_values_that_were_left_out_are_filled_from_a_live_value_of_the_same_structure(tmp_path):
    x, live = torch.ones(2), [len, {"f": max}, Pair(min, 3), Batch(torch.zeros(2), "live")]
    found = fill_left_out(saved(tmp_path, args=([abs, {"f": any, "x": x}, Pair(any, x), Batch(x, "stored")],)).args[0], live)
    assert found[0] is len
    assert found[1]["f"] is max
    assert torch.equal(found[1]["x"], x)
    assert type(found[2]) is Pair
    assert found[2].left is min
    assert torch.equal(found[2].right, x)
    assert type(found[3]) is Batch
    assert found[3].name == "stored"
    assert live[3].name == "live"


# ---- size and disk


def test_weights_that_do_not_fit_are_left_out_and_the_batch_is_stored(tmp_path):
    model = nn.Linear(512, 512)  # 1 MB
    found = saved(tmp_path, model, (torch.ones(2, 512),), optimizer=torch.optim.SGD(model.parameters(), lr=1.0), max_mb=0.5)
    assert all(stored.values is None for stored in found.parameters.values())
    assert found.parameters["weight"].shape == (512, 512)
    assert found.args[0].shape == (2, 512)
    assert found.left_out == ("parameters: 1.0 MB, with which the capsule would exceed 0.5 MB",)
    assert sum(path.stat().st_size for path in found.path.iterdir()) < 2**19


def test_loss_inputs_that_do_not_fit_are_left_out(tmp_path):
    dataset = torch.ones(1024, 1024)
    found = saved(tmp_path, args=(torch.ones(2, 4),), loss_inputs={"dataset": dataset}, max_mb=1)
    assert found.loss_inputs == {}
    assert found.left_out == ("loss_inputs: with them the capsule would exceed 1 MB",)
    assert all(stored.values is not None for stored in found.parameters.values())


def test_a_batch_that_does_not_fit_is_refused_with_the_size_to_set(tmp_path):
    with pytest.raises(SondeError, match="max_capsule_mb = 5"):
        save(tmp_path / "capsules", args=(torch.ones(1024, 1024),), max_mb=1)
    assert not (tmp_path / "capsules").exists()


def test_no_capsule_replaces_another(tmp_path):
    one, two = save(tmp_path, args=(1,)), save(tmp_path, args=(2,))
    (tmp_path / "step-000041-3").write_text("a file in the way")
    three = save(tmp_path, args=(3,))
    assert [path.name for path in (one, two, three)] == ["step-000041", "step-000041-2", "step-000041-4"]
    assert [load_capsule(path).args for path in (one, two, three)] == [(1,), (2,), (3,)]


def test_a_full_disk_leaves_no_files(tmp_path):
    code = f"""
import resource, torch
from torch import nn
from sonde.errors import SondeError
from sonde.replay.capsule.create_capsule import save_capsule
resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))
try:
    save_capsule({str(tmp_path)!r}, step=1, model=nn.Linear(512, 512), args=(), kwargs={{}})
except SondeError as error:
    print(error)
"""
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "No capsule could be written" in child.stdout
    assert list(tmp_path.iterdir()) == []


def test_a_process_killed_while_writing_leaves_no_capsule(tmp_path):
    code = f"""
import os, signal, torch
from torch import nn
from sonde.replay.capsule import create_capsule
os.fsync = lambda descriptor: os.kill(os.getpid(), signal.SIGKILL)
create_capsule.save_capsule({str(tmp_path)!r}, step=1, model=nn.Linear(2, 2), args=(), kwargs={{}})
"""
    child = subprocess.run([sys.executable, "-c", code], check=False)
    assert child.returncode == -signal.SIGKILL
    assert [path for path in tmp_path.iterdir() if not path.name.startswith(".")] == []


def test_a_directory_that_cannot_be_written_raises_an_error_with_its_name(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(SondeError, match=r"No capsule could be written to .*file"):
        save(tmp_path / "file")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"step": -1}, "step must be"), ({"step": True}, "step must be"), ({"model": len}, "nn.Module"), ({"max_mb": -1}, "max_mb")],
)
def test_invalid_arguments_raise_an_error_that_names_them(tmp_path, arguments, message):
    with pytest.raises(SondeError, match=message):
        save(tmp_path, **arguments)


def test_without_safetensors_the_error_names_the_package_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(SondeError, match=r"pip install 'sonde\[capsule\]'"):
        save(tmp_path)


# ---- hostile content


def assert_refused(path, message):
    with pytest.raises(SondeError, match=message):
        load_capsule(path)


def change(capsule, **fields):
    file = capsule / "capsule.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def write_tensors(capsule, header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    (capsule / "tensors.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)


def test_a_directory_without_a_capsule_is_refused(tmp_path):
    assert_refused(tmp_path / "nowhere", "No capsule in")
    assert_refused(tmp_path, "it has no capsule.json")


def test_a_capsule_of_a_later_format_is_refused(capsule):
    change(capsule, format=99)
    assert_refused(capsule, "format 99")


class Hostile:
    def __init__(self, canary):
        self.canary = canary

    def __reduce__(self):
        return os.mkdir, (self.canary,)


@pytest.mark.parametrize("name", ["capsule.json", "tensors.safetensors"])
def test_a_pickle_is_refused_and_not_loaded(capsule, tmp_path, name):
    canary = tmp_path / "pwned"
    payload = pickle.dumps(Hostile(str(canary)))
    for content in (payload, struct.pack("<Q", len(payload)) + payload):
        (capsule / name).write_bytes(content)
        assert_refused(capsule, "not a valid capsule")
    torch.save(Hostile(str(canary)), capsule / name)
    assert_refused(capsule, "not a valid capsule")
    assert not canary.exists()
    pickle.loads(payload)
    assert canary.exists()  # it would have worked


@pytest.mark.parametrize("length", [0, 1, 2**31, 2**63, 2**64 - 1])
def test_a_header_with_a_wrong_length_is_refused(capsule, length):
    (capsule / "tensors.safetensors").write_bytes(struct.pack("<Q", length) + b"{}")
    assert_refused(capsule, "not a valid capsule")


F32 = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    "header",
    [
        {"a": F32 | {"shape": [2**40, 2**40]}},
        {"a": F32 | {"shape": [-2]}},
        {"a": F32 | {"shape": [2.0]}},
        {"a": F32 | {"shape": [True, 2]}},
        {"a": F32 | {"shape": [1] * 1000}},
        {"a": F32 | {"data_offsets": [0, 10**12]}},
        {"a": F32 | {"data_offsets": [8, 0]}},
        {"a": F32 | {"data_offsets": "08"}},
        {"a": F32 | {"dtype": "OBJECT"}},
        {"a": F32 | {"dtype": ["F32"]}},
        {"a": F32, "b": F32},
        {"a": F32 | {"data_offsets": [4, 12]}},
        {"a": {}},
        {"a": None},
        {},
        b'{"a":' * 100_000,
        b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}',
        b"[" * 1_000_000,
        b'{"a": ' + b"9" * 100_000 + b"}",
        b"\xff\xfe{}",
    ],
    ids=lambda header: repr(header)[:60],
)
def test_an_invalid_header_is_refused(capsule, header):
    write_tensors(capsule, header, bytes(8))
    assert_refused(capsule, "not a valid capsule")


def test_a_truncated_file_is_refused(capsule):
    file = capsule / "tensors.safetensors"
    content = file.read_bytes()
    for length in (0, 4, 8, 100, len(content) // 2, len(content) - 1):
        file.write_bytes(content[:length])
        assert_refused(capsule, "not a valid capsule")


def test_a_file_above_the_size_limit_is_not_read(capsule):
    os.truncate(capsule / "tensors.safetensors", 2**40)  # a hole: it takes no space
    assert_refused(capsule, "at most 8,192 are read")


@pytest.mark.parametrize("name", ["capsule.json", "tensors.safetensors"])
def test_links_pipes_and_directories_are_refused(capsule, tmp_path, name):
    file = capsule / name
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    assert_refused(capsule, "a link")
    file.unlink()
    os.mkfifo(file)
    assert_refused(capsule, "not a valid capsule")
    file.unlink()
    file.mkdir()
    assert_refused(capsule, "not a valid capsule")


@pytest.mark.parametrize(
    "text",
    [
        "", "[]", "null", "{", '{"format": NaN}', '{"format": 1, "format": 1}', "[" * 100_000, '{"a":' * 100_000,
        '{"format": ' + "1" * 5000 + "}", "\ud800",
    ],
    ids=lambda text: repr(text)[:30],
)  # fmt: skip
def test_invalid_json_is_refused(capsule, text):
    (capsule / "capsule.json").write_bytes(text.encode("utf-8", "surrogatepass"))
    assert_refused(capsule, "not a valid capsule")


def nested(depth):
    value = 1
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    "tree",
    [
        nested(200),
        {"tensor": "../../etc/passwd"},
        {"tensor": "/etc/passwd"},
        {"tensor": ["args.0.0"]},
        {"tensor": "args.0", "device": "cuda"},
        {"tensor": "args.0", "requires_grad": 1},
        {"tensor": "args.0", "complex": True},
        {"array": "nothing"},
        {"dict": [["a", 1], ["a", 2]]},
        {"dict": [[{"float": "nan"}, 1]]},
        {"dict": [[1.5, 1]]},
        {"dict": {"a": 1}},
        {"fields": [["__class__", 1]]},
        {"fields": [["a b", 1]]},
        {"packed": [1, 2, 3, 4]},
        {"float": "1e5"},
        {"complex": ["a", 1]},
        {"dtype": "load"},
        {"dtype": "os.system"},
        {"device": "nowhere:9"},
        {"left_out": 3},
        {"object": "os.system"},
        {"tuple": [], "list": []},
        {},
        2**64,
        1e400,
    ],
    ids=lambda tree: repr(tree)[:40],
)
def test_values_that_sonde_would_not_write_are_refused(capsule, tree):
    text = json.dumps({"tuple": [tree]}).replace("Infinity", "1e400")
    fields = json.loads((capsule / "capsule.json").read_text()) | {"args": "HERE"}
    (capsule / "capsule.json").write_text(json.dumps(fields).replace('"HERE"', text))
    assert_refused(capsule, "not a valid capsule")


@pytest.mark.parametrize(
    "fields",
    [
        {"step": "41"}, {"step": True}, {"model": 3}, {"training": [1]}, {"kwargs": {"dict": [[1, 2]]}}, {"kwargs": []}, {"grad": 1},
        {"origin": 3}, {"origin": {"kind": "nan"}}, {"origin": []}, {"parameters": {}}, {"parameters": [1]}, {"autocast": {"cpu": "load"}},
        {"buffers": [["a", [2], "float32", {"tensor": "args.0"}]]}, {"buffers": [["a", ["x"], "float32", {"left_out": "x"}]]},
        {"left_out": [1]}, {"versions": []}, {"about": [1]}, {"format": None}, {"format": "1"},
    ],
    ids=repr,
)  # fmt: skip
def test_fields_of_the_wrong_type_are_refused(capsule, fields):
    change(capsule, **fields)
    assert_refused(capsule, "not a valid capsule")
