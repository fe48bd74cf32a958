"""Typed events: one dataclass per kind, written and read back without loss; reading never raises and old logs stay readable (R40)."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tarfile
from dataclasses import FrozenInstanceError, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sonde.events import (
    EVENT_TYPES,
    DataPass,
    Ended,
    Event,
    ModelWatched,
    NonFinite,
    OriginFound,
    SpikeDetected,
    Started,
    TypedEvent,
    UnknownEvent,
    UnreadableEvent,
    UpdateSkipped,
    decode,
    encode,
    event_fields,
)
from sonde.runlog.run_reader import Run
from sonde.runlog.writer import Writer

TESTS = Path(__file__).parents[1]
KINDS = [event_type.KIND for event_type in EVENT_TYPES]
BY_NAME = pytest.mark.parametrize("event_type", EVENT_TYPES, ids=lambda event_type: event_type.__name__)

EXAMPLES: dict[str, Any] = {
    "str": "text", "bool": True, "int": 3, "float": 0.5, "object": {"a": [1, None]}, "object of int": {"cpu": 2},
    "object of float": {"mm": 0.25}, "list of str": ["a", "b"], "list of int": [1, 2], "list of float": [0.5, 2],
    "list of object": [{"a": 1}, {}], "list of list of str or float": [["fc", 2.0]],
}  # fmt: skip

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=8,
)


def example(event_type: type[TypedEvent]) -> TypedEvent:
    """An event with a value in every field."""
    first_types = {each.name: each.type_name.split(" or null")[0].split(" or list")[0] for each in event_fields(event_type)}
    return event_type(**{name: EXAMPLES[type_name] for name, type_name in first_types.items()})


def write(directory: Path, *events: TypedEvent | tuple[str, dict[str, Any]]) -> Run:
    writer = Writer(directory)
    for step, event in enumerate(events):
        if isinstance(event, TypedEvent):
            writer.emit(event, step)
        else:
            writer.event(event[0], step, event[1])
    writer.close()
    return Run(directory)


# ---- the dataclasses


def test_each_kind_has_one_class():
    assert len(set(KINDS)) == len(EVENT_TYPES)


@BY_NAME
def test_an_event_type_is_a_dataclass_with_a_description_of_itself_and_of_each_field(event_type):
    assert is_dataclass(event_type)
    assert event_type.__doc__
    assert event_type.__doc__.strip()[0].isupper() or event_type.__doc__.startswith(("`", "torch"))
    assert all(each.doc for each in event_fields(event_type))


@BY_NAME
def test_the_keys_of_an_event_type_are_unique(event_type):
    assert len({each.key for each in event_fields(event_type)}) == len(event_fields(event_type))


def test_an_event_is_frozen_and_comparable_and_can_be_copied_with_changes():
    event = NonFinite(what="loss", where="loss", num_nan=1)
    with pytest.raises(FrozenInstanceError):
        event.what = "gradient"
    with pytest.raises(FrozenInstanceError):
        del event.what
    assert event == NonFinite(what="loss", where="loss", num_nan=1)
    assert hash(event) == hash(NonFinite(what="loss", where="loss", num_nan=1))
    assert event != NonFinite(what="loss", where="loss")
    assert replace(event, num_nan=None) == NonFinite(what="loss", where="loss")
    assert repr(NonFinite(what="loss", where="")).startswith("NonFinite(step=-1, extra={}, what='loss', where='', num_elements=None")


def test_missing_and_unknown_arguments_are_refused():
    with pytest.raises(TypeError, match="where"):
        NonFinite(what="loss")
    with pytest.raises(TypeError, match="color"):
        NonFinite(what="loss", where="", color="red")


def test_two_events_do_not_share_their_extra_fields():
    assert NonFinite(what="", where="").extra is not NonFinite(what="", where="").extra


def test_importing_the_events_loads_neither_torch_nor_numpy_and_importing_sonde_does_not_load_them():
    loaded = "import sys; import {}; print(*sys.modules)"
    modules = {
        name: subprocess.run([sys.executable, "-c", loaded.format(name)], capture_output=True, text=True, check=True).stdout.split()
        for name in ("sonde.events", "sonde", "sonde.cli")
    }
    assert not {"torch", "numpy"} & set(modules["sonde.events"])
    assert "sonde.events" not in modules["sonde"]
    assert "sonde.events" not in modules["sonde.cli"]


# ---- encoding and decoding


@BY_NAME
def test_every_kind_survives_encoding_and_decoding(event_type):
    event = example(event_type)
    kind, data = encode(event)
    assert kind == event_type.KIND
    assert list(data) == [each.key for each in event_fields(event_type)]
    assert decode(kind, 7, data) == replace(event, step=7)


@BY_NAME
def test_every_kind_survives_the_log(event_type, tmp_path):
    run = write(tmp_path, example(event_type))
    assert list(run.events(event_type)) == [replace(example(event_type), step=0)]
    assert run.num_unreadable_events == 0


@BY_NAME
def test_an_event_without_any_data_takes_its_defaults(event_type):
    event = decode(event_type.KIND, 0, {})
    assert isinstance(event, event_type)
    assert not event.extra
    for each in event_fields(event_type):
        assert each.accepts(getattr(event, each.name))


@BY_NAME
def test_each_value_of_a_wrong_type_makes_the_event_unreadable(event_type):
    kind, data = encode(example(event_type))
    for each in event_fields(event_type):
        wrong = data | {each.key: 3 if each.type_name.startswith("str") else "text"}
        event = decode(kind, 0, wrong)
        assert isinstance(event, UnreadableEvent), each
        assert each.key in event.reason
        assert event.data == wrong


def test_fields_without_a_value_are_left_out_of_the_log_unless_null_has_a_meaning():
    assert encode(NonFinite(what="gradient", where="fc.weight")) == ("nonfinite", {"what": "gradient", "where": "fc.weight"})
    assert encode(Ended(how="exit", exit_code=None, exception="")) == ("end", {"how": "exit", "exit_code": None, "exception": ""})
    assert encode(DataPass(loader=0, pass_number=1, num_batches=None)) == ("pass", {"loader": 0, "num": 1, "num_batches": None})
    skipped = UpdateSkipped(where="", num_bad=1, num_parameters=2, num_nan=0, scale=2.0, scale_after=1.0)
    assert set(encode(skipped)[1]) == {"where", "num_bad", "num_parameters", "num_nan", "scale", "scale_after"}
    spike = SpikeDetected(what="loss", where="loss", value=9.0, median=1.0, low=0.5, high=1.5, bound=6.0, search_ms=1.0)
    assert set(encode(spike)[1]) == {each.key for each in event_fields(SpikeDetected)}


@pytest.mark.parametrize(
    ("key", "value", "is_accepted"),
    [
        ("num_parameters", 3, True), ("num_parameters", True, False), ("num_parameters", 3.0, False), ("num_parameters", None, False),
        ("compiled", False, True), ("compiled", 0, False), ("class", "Net", True), ("class", b"Net", False), ("class", None, False),
    ],
)  # fmt: skip
def test_types_are_checked_exactly(key, value, is_accepted):
    assert isinstance(decode("model", 0, {key: value}), ModelWatched) is is_accepted


def test_a_float_may_be_an_integer_but_not_a_boolean():
    assert isinstance(decode("nonfinite", 0, {"num_nan": 3}), NonFinite)
    assert isinstance(decode("nonfinite", 0, {"num_nan": True}), UnreadableEvent)


def test_an_unknown_kind_is_kept_as_it_is():
    event = decode("weather", 3, {"rain": [1, None]})
    assert event == UnknownEvent(kind="weather", step=3, extra={"rain": [1, None]})
    assert isinstance(event, UnknownEvent)
    assert encode(event) == ("weather", {"rain": [1, None]})


def test_unknown_fields_are_kept_and_written_again():
    data = {"what": "loss", "where": "loss", "step": 9, "extra": {"a": 1}, "device": "cuda:0"}
    event = decode("nonfinite", 3, data)
    assert isinstance(event, NonFinite)
    assert (event.step, event.extra) == (3, {"step": 9, "extra": {"a": 1}, "device": "cuda:0"})
    assert encode(event) == ("nonfinite", data)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(kind=st.sampled_from(KINDS) | json_values, step=st.integers() | json_values, data=json_values)
def test_decoding_arbitrary_values_never_raises(kind, step, data):
    assert isinstance(decode(kind, step, data), (TypedEvent, UnreadableEvent))


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_decoding_a_known_kind_with_arbitrary_values_never_raises(data):
    event_type = data.draw(st.sampled_from(EVENT_TYPES))
    keys = st.sampled_from([each.key for each in event_fields(event_type)]) | st.text()
    values = data.draw(st.dictionaries(keys, json_values, max_size=6))
    event = decode(event_type.KIND, 0, values)
    if isinstance(event, UnreadableEvent):
        assert event.data == values
    else:
        assert isinstance(event, event_type)
        known = encode(event)[1]
        assert all(known[key] is values[key] for key in values if values[key] is not None)


# ---- events of a run


def test_an_event_of_a_run_has_its_data_and_its_typed_form(tmp_path):
    run = write(tmp_path, ("nonfinite", {"what": "loss", "where": "loss", "num_nan": 1}))
    (event,) = run.events("nonfinite")
    assert event == Event("nonfinite", 0, {"what": "loss", "where": "loss", "num_nan": 1})
    assert event.typed == NonFinite(step=0, what="loss", where="loss", num_nan=1)
    assert event.typed is event.typed


def test_a_wrong_type_is_counted_and_the_other_events_are_read(tmp_path):
    good = NonFinite(what="loss", where="loss")
    run = write(tmp_path, good, ("nonfinite", {"what": ["loss"]}), ("weather", {"rain": 1}), ("end", {"how": 3}), good)
    assert run.num_unreadable_events == 2
    assert [event.step for event in run.events(NonFinite)] == [0, 4]
    assert [event.kind for event in run.events()] == ["nonfinite", "nonfinite", "weather", "end", "nonfinite"]
    assert not run.damage
    assert run.ended.how == "3"  # from the stored data, as before


def test_a_writer_survives_what_is_no_event(tmp_path):
    writer = Writer(tmp_path)
    writer.emit(None, 3)  # type: ignore[arg-type]
    writer.emit(NonFinite(what="loss", where="loss"), 4)
    writer.close()
    assert writer.num_dropped == 1
    assert [event.step for event in Run(tmp_path).events(NonFinite)] == [4]


def test_typed_events_can_be_chosen_by_rank(tmp_path):
    for rank in (0, 1):
        writer = Writer(tmp_path, rank=rank)
        writer.emit(NonFinite(what="loss", where=f"rank {rank}"), 0)
        writer.close()
    assert [event.where for event in Run(tmp_path).events(NonFinite)] == ["rank 0", "rank 1"]
    assert [event.where for event in Run(tmp_path).events(NonFinite, rank=1)] == ["rank 1"]


# ---- golden logs and today's trainings


def golden_runs(folder: Path) -> list[Run]:
    with tarfile.open(TESTS / "integration" / "golden" / "runs-0.1.0.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    formats = [path for path in (TESTS / "unit" / "runlog" / "golden").iterdir() if path.is_dir() and (path / "run.json").exists()]
    return [Run(path) for path in [*formats, *sorted((folder / "golden").iterdir())]]


def test_r40_every_event_of_the_golden_logs_is_readable_and_encodes_to_the_same_data(tmp_path):
    runs = golden_runs(tmp_path)
    assert len(runs) > 30
    found = set()
    for run in runs:
        assert run.num_unreadable_events == 0
        for event in run.events():
            typed = event.typed
            assert type(typed) in EVENT_TYPES, event
            found.add(type(typed))
            missing = {each.key for each in event_fields(type(typed)) if each.is_required} - event.data.keys()
            if run.name == "format-1":  # made by hand, with a few fields only
                assert type(typed) in (Started, NonFinite, Ended)
            else:
                assert not missing
                assert not typed.extra
                assert repr(encode(typed)) == repr((event.kind, event.data))  # in the same order; repr: NaN is not equal to itself
    assert {Started, NonFinite, OriginFound, DataPass, Ended} <= found


TRAININGS = {
    "bad_at_the_end": 5, "spiking": 13, "from_a_loader": 1, "parameters_in_two_groups": 7, "never_cleared": 50, "scaled": 13,
    "evaluated_between": 13, "two_networks": 20,
}  # fmt: skip


@pytest.mark.torch
@pytest.mark.parametrize(("name", "every"), TRAININGS.items())
def test_every_event_that_a_training_writes_today_is_complete(name, every, tmp_path):
    pytest.importorskip("torch")
    from training_loops import record

    record(name, every, tmp_path)
    events = list(Run(tmp_path).events())
    assert len(events) > 5
    for event in events:
        typed = event.typed
        assert type(typed) in EVENT_TYPES, event
        assert not typed.extra
        assert not {each.key for each in event_fields(type(typed)) if each.is_required} - event.data.keys()
        assert repr(encode(typed)) == repr((event.kind, event.data))


@pytest.mark.torch
def test_the_events_of_a_session_with_default_settings_are_readable(tmp_path):
    torch = pytest.importorskip("torch")
    import sonde

    model = torch.nn.Linear(2, 1)
    with sonde.watch(model, torch.optim.SGD(model.parameters(), lr=0.1), to=tmp_path):
        pass
    (started,) = Run(tmp_path).events(Started)
    assert started.every is None


# ---- the documentation


def test_the_event_table_of_the_documentation_is_up_to_date():
    spec = importlib.util.spec_from_file_location("generate_event_table", TESTS.parent / "docs" / "generate_event_table.py")
    assert spec is not None
    assert spec.loader is not None
    generator = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generator)
    page = generator.PAGE.read_text(encoding="utf-8")
    assert page == generator.with_event_table(page), "run: python docs/generate_event_table.py"
    for event_type in EVENT_TYPES:
        assert f"| `{event_type.KIND}` | `{event_type.__name__}` |" in page


def test_all_fields_of_an_event_type_are_described_in_its_annotations():
    for event_type in EVENT_TYPES:
        own = {each.name for each in fields(event_type)} - {"step", "extra"}
        assert own == {each.name for each in event_fields(event_type)}
