"""What is proposed for which script, and why some things are not."""

from dataclasses import replace

import pytest

from sonde.errors import SondeError
from sonde.tuning.proposals import FAMILIES, Patch, chosen_families, propose
from sonde.tuning.trial_messages import CallSite, DataLoaderInfo, ModelInfo, OptimizerInfo, Survey

LINE = CallSite("project/train.py:7", "train.py:7", "loader = DataLoader(data)")
LOADER = DataLoaderInfo(
    LINE, num_workers=0, batch_size=8, pin_memory=False, is_iterable=False, is_persistent=False, num_epochs=1, fed_share=1.0
)
ADAM = OptimizerInfo(CallSite("project/train.py:9", "train.py:9"), "Adam", ("foreach", "fused"), "loop", "cpu")
MODEL = ModelInfo(
    CallSite("project/train.py:12", "train.py:12"), "net", "cpu", is_float32=True, num_conv2d=3, takes_images=True,
    is_channels_last=False, in_autocast=False, is_compiled=False,
)  # fmt: skip
SURVEY = Survey((LOADER,), (ADAM,), (MODEL,), num_threads=4, num_cores=4, has_compiler=True)
ON_CUDA = replace(SURVEY, optimizers=(replace(ADAM, device="cuda", implementation="foreach"),), models=(replace(MODEL, device="cuda"),))


def names(survey, family):
    found, reasons = propose(survey, [family])
    return [each.name for each in found] or reasons[family]


def test_on_a_cpu_everything_but_pinned_memory_is_tried():
    found, reasons = propose(SURVEY, tuple(FAMILIES))
    assert {each.family for each in found} == set(FAMILIES) - {"pin"}
    assert reasons == {"pin": "nothing is on an accelerator"}


def test_on_a_device_threads_are_not_tried_and_pinned_memory_is():
    assert names(ON_CUDA, "pin") == ["pin_memory"]
    assert "accelerator" in names(ON_CUDA, "threads")
    assert names(ON_CUDA, "optimizer") == ["fused"]  # foreach is what torch takes there by itself


def test_workers_follow_the_cores_and_leave_out_what_is_there_already():
    assert names(SURVEY, "workers") == ["workers=1", "workers=2", "workers=4"]
    busy = replace(SURVEY, loaders=(replace(LOADER, num_workers=4),))
    assert names(busy, "workers") == ["workers=0", "workers=1", "workers=2"]


def test_without_workers_what_belongs_to_them_goes_too():
    busy = replace(SURVEY, loaders=(replace(LOADER, num_workers=4),))
    (none, *_), _ = propose(busy, ["workers"])
    assert none.patch.loaders[LINE.key] == {
        "num_workers": 0, "prefetch_factor": None, "persistent_workers": False, "timeout": 0, "multiprocessing_context": None,
    }  # fmt: skip


def test_workers_are_persistent_if_the_epochs_are_short():
    short = replace(SURVEY, loaders=(replace(LOADER, num_epochs=4),))
    found, _ = propose(short, ["workers"])
    assert found[0].change == "DataLoader(…, num_workers=1, persistent_workers=True)"


def test_an_iterable_dataset_is_not_given_workers():
    assert "iterable" in names(replace(SURVEY, loaders=(replace(LOADER, is_iterable=True),)), "workers")


def test_a_loader_that_only_validation_reads_is_left_alone():
    validation = replace(LOADER, site=CallSite("project/train.py:8", "train.py:8"), fed_share=0.02)
    found, _ = propose(replace(SURVEY, loaders=(LOADER, validation)), ["workers"])
    assert all(list(each.patch.loaders) == [LINE.key] for each in found)


def test_an_optimizer_that_is_fused_already_is_left_alone():
    assert names(replace(SURVEY, optimizers=(replace(ADAM, implementation="fused"),)), "optimizer") == "the optimizer is fused already"


def test_fused_and_foreach_take_each_others_place():
    found, _ = propose(SURVEY, ["optimizer"])
    assert [each.patch.optimizers[ADAM.site.key] for each in found] == [{"foreach": True, "fused": None}, {"fused": True, "foreach": None}]


@pytest.mark.parametrize(
    ("family", "change"),
    [
        ("channels_last", {"takes_images": False}),
        ("channels_last", {"num_conv2d": 0}),
        ("channels_last", {"is_channels_last": True}),
        ("autocast", {"in_autocast": True}),
        ("autocast", {"is_float32": False}),
        ("compile", {"is_compiled": True}),
    ],
    ids=lambda each: each if isinstance(each, str) else next(iter(each)),
)
def test_what_makes_no_sense_for_a_model_is_not_tried(family, change):
    assert isinstance(names(SURVEY, family), list)
    assert isinstance(names(replace(SURVEY, models=(replace(MODEL, **change),)), family), str)


def test_nothing_is_compiled_where_there_is_no_compiler():
    assert "compiler" in names(replace(SURVEY, has_compiler=False), "compile")


@pytest.mark.parametrize("family", list(FAMILIES))
def test_a_script_of_which_nothing_is_known_gets_a_reason(family):
    answer = names(Survey(num_threads=1, num_cores=1), family)
    assert isinstance(answer, str)
    assert answer


def test_another_batch_size_is_another_training():
    found, _ = propose(SURVEY, ["batch"])
    assert [(each.name, each.same_training) for each in found] == [("batch_size=16", False), ("batch_size=32", False)]


def test_patches_add_up():
    workers, fused = Patch(loaders={"a": {"num_workers": 2}}), Patch(optimizers={"b": {"fused": True}}, models=("compile",))
    both = workers | fused | Patch(loaders={"a": {"pin_memory": True}}, threads=2)
    assert both == Patch({"a": {"num_workers": 2, "pin_memory": True}}, {"b": {"fused": True}}, ("compile",), 2)
    assert both.num_workers == 2


def test_a_family_that_does_not_exist_is_refused_with_the_nearest():
    with pytest.raises(SondeError, match="Nearest: workers"):
        chosen_families(["worker"])
    assert chosen_families(["threads", "workers"]) == ("workers", "threads")
